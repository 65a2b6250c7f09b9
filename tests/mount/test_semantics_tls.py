"""The same mount over https: a real server that speaks TLS, whose authority only the manifest names (S-160)."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.authority import HERE, Authority, Subject
from tests.mount.conftest import Breaking, new_bucket
from tests.mount.mounts import TTL, Mount, mounted
from tests.promises import promise
from tests.servers import Server, run_versitygw

pytestmark = pytest.mark.fuse

MIB = 1 << 20
LARGE = random.Random(160).randbytes(72 * MIB)


@pytest.fixture(scope="module")
def shared(versitygw_tls: Server, clean_environment: Path) -> Iterator[Mount]:
    """One mount for the tests that need no other."""
    bucket = new_bucket(versitygw_tls)
    with mounted(versitygw_tls, bucket, clean_environment, metadataTTL=TTL) as mount:
        yield mount


@promise("S-160")
def test_a_large_file_is_read_cold_by_ranges(shared: Mount) -> None:
    """From its beginning to its end, and here and there by several at once."""
    shared.objects.put("large", LARGE)
    shared.objects.put("here-and-there", LARGE)

    def at(offset: int) -> bool:
        with (shared.path / "here-and-there").open("rb", buffering=0) as file:
            return os.pread(file.fileno(), MIB, offset) == LARGE[offset : offset + MIB]

    assert (shared.path / "large").read_bytes() == LARGE
    offsets = random.Random(0).sample(range(len(LARGE) - MIB), 24)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(at, offsets))


@promise("S-160")
def test_what_is_written_arrives(shared: Mount) -> None:
    """In parts and in one piece, renamed and appended to."""
    with (shared.path / "written").open("wb") as file:
        for at in range(0, len(LARGE), MIB):
            file.write(LARGE[at : at + MIB])
    os.rename(shared.path / "written", shared.path / "renamed")
    for name, text in (("renamed", b"the end"), ("log", b"the end"), ("log", b"one line\n")):
        with (shared.path / name).open("ab") as file:
            file.write(text)

    assert shared.objects.get("renamed") == LARGE + b"the end"
    assert shared.objects.get("log") == b"the endone line\n"
    assert not shared.objects.exists("written")


@promise("S-160")
def test_it_goes_on_when_the_server_was_away(authority: Authority, breaking: Breaking) -> None:
    """Every connection is lost in the middle of a read and a write."""
    with breaking(authority.issue("breakable", HERE)) as (storage, mount), ThreadPoolExecutor(1) as pool:
        mount.objects.put("large", LARGE)
        reading = pool.submit((mount.path / "large").read_bytes)
        with (mount.path / "written").open("wb") as file:
            file.write(LARGE[: 40 * MIB])
            os.kill(storage.server.pid, signal.SIGKILL)
            began = time.monotonic()
            storage.run()
            took_s = time.monotonic() - began
            file.write(LARGE[40 * MIB :])
        assert took_s < 45, "less than a send is tried for: the store's start must not wait for the changed file"
        assert reading.result(200) == LARGE
        assert mount.objects.get("written") == LARGE
        assert mount.status()["dirty"] == []


OTHER = Subject(common_name="other", names=("s3.example.org",))
MINUTE, YEARS = timedelta(minutes=1), timedelta(days=3650)
WRONG = {
    "expired": (HERE, MINUTE, ("certificate has expired", "renew it on the server")),
    "other": (OTHER, YEARS, ("for another host", "not valid for '127.0.0.1'", "spec.s3.endpoint")),
    "unknown": (HERE, YEARS, ("certificate is not trusted", "spec.s3.caBundle")),
}


@promise("S-160")
@pytest.mark.parametrize("name", WRONG)
def test_a_certificate_that_is_not_right_is_refused_in_one_line(
    authority: Authority, clean_environment: Path, tmp_path: Path, name: str
) -> None:
    """What is wrong with it, and what to change."""
    subject, validity, words = WRONG[name]
    if name == "unknown":
        authority = Authority(tmp_path)
    identity = authority.issue(name, subject, validity=validity)
    with run_versitygw(identity=identity) as server:
        told = replace(server, ca_file="") if name == "unknown" else server
        machine = Mount(told, "data", folder=Path(tempfile.mkdtemp(prefix="m", dir=clean_environment)))
        done = machine.try_mount()
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert not os.path.ismount(machine.path)
