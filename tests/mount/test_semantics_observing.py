"""What a mount tells of itself (docs/SEMANTICS.md, S-63), and what an outage does to those who use it (S-64)."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mount.conftest import new_bucket
from tests.mount.mounts import Mount, error_of, mounted
from tests.mount.outages import breakable
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server

pytestmark = pytest.mark.fuse

AWAY_S = 30.0


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
def test_the_same_numbers_in_status_top_and_the_endpoint(versitygw: Server, clean_environment: Path) -> None:
    home = clean_environment / "metrics"
    mount = Mount(versitygw, new_bucket(versitygw), home)
    done = mount.try_mount("--metrics", "127.0.0.1:0")
    assert done.returncode == 0, done.stderr
    try:
        told = mount.told()
        mount.pids = [told["supervisorPid"], told["serverPid"]]
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
        assert short.startswith(f"{where}  via s3: our own engine speaks S3\n  cache: ")
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
    finally:
        mount.end()


@promise("S-63")
def test_a_taken_address_mounts_nothing(versitygw: Server, clean_environment: Path) -> None:
    mount = Mount(versitygw, new_bucket(versitygw), clean_environment / "taken")
    address = versitygw.endpoint.removeprefix("http://")
    done = mount.try_mount("--metrics", address)
    assert done.returncode != 0
    assert f"--metrics {address}: can't listen there" in done.stderr
    assert not os.path.ismount(mount.path)


@promise("S-64")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_half_a_minute_without_the_store_is_a_pause(versitygw: Server, clean_environment: Path, tmp_path: Path) -> None:
    """Reads, writes, listings and changes that meet an outage wait for its end, and succeed."""
    with breakable(str(tmp_path)) as storage:
        server = storage.server
        with mounted(server, new_bucket(server), clean_environment, metadataTTL="100ms") as mount:
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
def test_who_asks_is_told_since_when_the_store_is_away(
    versitygw: Server, clean_environment: Path, tmp_path: Path
) -> None:
    """By status, list and top; nobody waits for the storage meanwhile."""
    with (
        breakable(str(tmp_path)) as storage,
        mounted(storage.server, new_bucket(storage.server), clean_environment, metadataTTL="100ms") as mount,
        ThreadPoolExecutor(1) as pool,
    ):
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
