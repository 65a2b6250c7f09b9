"""An outage longer than the patience of the mount (docs/SEMANTICS.md, S-19, S-64, S-109): it waits that long."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import TTL, error_of, fails, mounted
from tests.mount.outages import breakable
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server

pytestmark = pytest.mark.fuse

BUDGET_S = 60.0
"""How long a request is tried (fuse/store/backoff.py)."""
MOST_S = BUDGET_S * 1.7
"""Above that on a busy machine, and below twice that: what the kernel asks again by itself."""
RETRY_S = 30.0
"""How often a failed upload is tried again by itself."""


def timed_error_of(call: Callable[..., object], *arguments: object) -> tuple[int, float]:
    """The errno with which a call ends, and its seconds."""
    began = time.monotonic()
    code = error_of(call, *arguments)
    return code, time.monotonic() - began


@promise("S-19", "S-64", "S-109")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_close_fails_within_its_deadline_and_the_bytes_arrive_later(
    versitygw: Server, clean_environment: Path, tmp_path: Path
) -> None:
    """With the server gone each call is EIO after its 60 s; when it is back the bytes are sent.

    The kernel asks for a name twice when the first answer is an error, and that is one call all the same. With a store
    that hangs a create ends in that time too, and is made afterwards or not.
    """
    for name in ("stopped", "frozen"):
        (tmp_path / name).mkdir()
    with breakable(str(tmp_path / "stopped")) as storage, breakable(str(tmp_path / "frozen")) as frozen:
        server = storage.server
        with (
            mounted(server, new_bucket(server), clean_environment, metadataTTL=TTL) as mount,
            mounted(frozen.server, new_bucket(frozen.server), clean_environment, metadataTTL=TTL) as other,
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
