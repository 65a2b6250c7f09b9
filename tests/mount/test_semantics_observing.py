"""What a mount tells of itself (docs/SEMANTICS.md, S-63), and what an outage does to its users (S-64, S-109)."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mount.conftest import Breaking, Mounter
from tests.mount.mounts import TTL, error_of, fails
from tests.patience import eventually
from tests.promises import promise

pytestmark = pytest.mark.fuse

AWAY_S = 30.0
BUDGET_S = 60.0
"""How long a request is tried (fuse/store/retrying.py)."""
MOST_S = BUDGET_S * 1.7
"""Above that on a busy machine, and below twice that: what the kernel asks again by itself."""
RETRY_S = 30.0
"""How often a failed upload is tried again by itself."""


def scrape(url: str) -> dict[str, float]:
    """Each series by name, those with labels added up."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@promise("S-63")
def test_the_same_numbers_in_status_top_and_the_endpoint(mount_with: Mounter) -> None:
    with mount_with(options=("--metrics", "127.0.0.1:0")) as mount:
        mount.objects.put("other", b"x" * 70_000)
        (mount.path / "file").write_bytes(os.urandom(100_000))
        assert (mount.path / "other").read_bytes() == b"x" * 70_000
        # who reads has his answer before it is counted
        eventually(lambda: mount.told()["readBytes"] >= 70_000, "it has counted what was read")
        told = mount.told()
        seen = scrape(told["metrics"])
        assert seen["datastore_store_sent_bytes_total"] == 100_000
        assert seen["datastore_store_received_bytes_total"] >= 70_000
        assert seen["datastore_fuse_written_bytes_total"] == told["writtenBytes"] == 100_000
        assert seen["datastore_fuse_read_bytes_total"] == told["readBytes"] >= 70_000
        assert seen["datastore_cache_misses_total"] == told["cache"]["misses"]
        assert seen["datastore_fuse_requests_total"] >= sum(told["requests"].values())
        assert seen["process_resident_memory_bytes"] > 10 << 20
        short = mount.command("status", mount.path).stdout
        where = f"work\n  mounted at {mount.path}, from s3://{mount.bucket}/\n"
        assert short.startswith(f"{where}  via s3: this program's own S3 client\n  cache: ")
        assert len(short.splitlines()) == 4
        shown = mount.command("status", "-v", mount.path).stdout
        assert "REQUESTS" in shown
        assert "STORE" in shown
        (row,) = json.loads(mount.command("top", "--once", "-n", "0.2", "-o", "json").stdout)
        assert (row["name"], row["state"], row["errors"], row["dirtyFiles"]) == ("work", "mounted", 0, 0)
        mount.kill_server()
        assert (mount.path / "file").stat().st_size == 100_000
        eventually(lambda: "metrics" in mount.told(), "the endpoint is there again")
        told = mount.told()
        mount.pids = [told["supervisorPid"], told["serverPid"]]
        assert scrape(told["metrics"])["datastore_server_restarts_total"] == 1


@promise("S-64")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_half_a_minute_without_the_store_is_a_pause(breaking: Breaking) -> None:
    """Reads, writes, listings and changes that meet an outage wait for its end, and succeed."""
    with breaking(metadataTTL="100ms") as (storage, mount):
        path = mount.path
        (path / "d").mkdir()
        (path / "old").write_bytes(b"old")
        mount.objects.put("cold", b"cold" * 1000)
        mount.objects.put("d/inside", b"")
        (path / "other").write_bytes(b"here")
        started = threading.Barrier(7, timeout=60)

        def written() -> bool:
            (path / "new").write_bytes(b"new" * 1000)
            return mount.objects.get("new") == b"new" * 1000

        def renamed() -> bool:
            (path / "old").rename(path / "moved")
            return mount.objects.get("moved") == b"old"

        def removed() -> bool:
            (path / "other").unlink()
            return not mount.objects.exists("other")

        def made() -> bool:
            (path / "made").mkdir()
            return mount.objects.exists("made/")

        calls: list[Callable[[], bool]] = [
            *(written, renamed, removed, made),
            lambda: (path / "cold").read_bytes() == b"cold" * 1000,
            lambda: os.listdir(path / "d") == ["inside"],
        ]

        def timed(call: Callable[[], bool]) -> tuple[bool, float]:
            started.wait()
            began = time.monotonic()
            return call(), time.monotonic() - began

        storage.stop()
        with ThreadPoolExecutor(len(calls)) as pool:
            running = [pool.submit(timed, call) for call in calls]
            started.wait()
            back = time.monotonic() + AWAY_S
            eventually(lambda: mount.told()["storage"], "it says that the storage does not answer", AWAY_S)
            time.sleep(max(0.0, back - time.monotonic()))
            storage.run()
            ended = [each.result(120) for each in running]
        assert all(right for right, _ in ended)
        assert max(seconds for _, seconds in ended) >= AWAY_S - 1
        assert mount.told().get("errors") == {}
        assert mount.told()["storage"] == {}


@promise("S-196")
@pytest.mark.slow
def test_who_asks_is_told_since_when_the_store_is_away(breaking: Breaking) -> None:
    """By status, list and top; nobody waits for the storage meanwhile."""
    with breaking(metadataTTL="100ms") as (storage, mount), ThreadPoolExecutor(1) as pool:
        (mount.path / "file").write_bytes(b"x")
        storage.stop()
        looking = pool.submit(error_of, (mount.path / "unknown").stat)
        eventually(lambda: mount.told()["storage"], "it says that the storage does not answer")
        since = mount.told()["storage"]["since"]
        # computed anew each time: it may come to lie just before a full second, or after it
        times = [time.strftime("%H:%M:%S", time.localtime(since + off_s)) for off_s in (-0.05, 0.05)]
        for verb in (("status",), ("list",), ("top", "--once", "-n", "0.2")):
            said = mount.command(*verb).stdout
            assert any(f"storage has not answered since {each}" in said for each in times), said
        assert "connection refused" in mount.command("status").stdout
        storage.run()
        assert looking.result(120) in (errno.ENOENT, errno.EIO)


def timed_error_of(call: Callable[..., object], *arguments: object) -> tuple[int, float]:
    """The errno with which a call ends, and its seconds."""
    began = time.monotonic()
    code = error_of(call, *arguments)
    return code, time.monotonic() - began


@promise("S-19", "S-64", "S-109")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_close_fails_within_its_deadline_and_the_bytes_arrive_later(breaking: Breaking) -> None:
    """With the server gone each call is EIO after its 60 s; when it is back the bytes are sent.

    The kernel asks for a name twice when the first answer is an error, and that is one call all the same. With a store
    that hangs a create ends in that time too, and is made afterwards or not.
    """
    with (
        breaking(metadataTTL=TTL) as (storage, mount),
        breaking(metadataTTL=TTL) as (frozen, other),
        ThreadPoolExecutor(2) as pool,
    ):
        frozen.freeze()
        made = other.path / "made"
        creating = pool.submit(timed_error_of, os.open, made, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        mount.objects.put("cold", b"never read before")
        assert (mount.path / "cold").stat().st_size == 17
        file = (mount.path / "file").open("wb", buffering=0)
        file.write(b"content")
        storage.stop()
        began = time.monotonic()
        reading = pool.submit(error_of, (mount.path / "cold").read_bytes)
        fails(errno.EIO, file.close)
        assert time.monotonic() - began < MOST_S
        assert reading.result(MOST_S) == errno.EIO
        assert BUDGET_S * 0.8 < time.monotonic() - began < MOST_S
        (dirty,) = mount.status()["dirty"]
        assert dirty["path"] == "file"
        assert "refused" in dirty["error"]
        code, took_s = creating.result(MOST_S)
        print(f"create of a file while the store hangs: {errno.errorcode[code]} after {took_s:.1f} s")
        assert code in {errno.EIO, errno.ETIMEDOUT}
        assert took_s < MOST_S
        frozen.thaw()
        eventually(lambda: other.objects.exists("made") == made.exists(), "both see whether it was made after all")
        storage.run()
        eventually(lambda: mount.objects.exists("file"), "the bytes arrive", RETRY_S * 2 + BUDGET_S)
        assert mount.objects.get("file") == b"content"
        eventually(lambda: mount.status()["dirty"] == [], "nothing is listed")
        assert (mount.path / "cold").read_bytes() == b"never read before"
        assert (mount.path / "file").read_bytes() == b"content"
