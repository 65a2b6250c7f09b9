"""What a server answers to READ that no server should."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import SFTPLocation
from datastore.fuse.loop import Loop
from datastore.fuse.ops import ROOT_INO, Fh
from datastore.fuse.sftp.connection import Connection
from datastore.fuse.sftp.filesystem import SFTPFilesystem
from tests.mount.mounts import error_of


def test_an_answer_that_is_longer_than_what_was_asked_for_is_eio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told in one line, however often it comes: it is no defect of ours."""

    def call(what: str, _ask: object, **_: object) -> bytes:
        return b"x" * 11 if what == "read" else b""

    location = SFTPLocation(host="h", path="/p")
    connection: Any = SimpleNamespace(location=location, call=call)
    spec = MountSpec(name="n", mountpoint="/m", source=location, state_dir=str(tmp_path), cache_dir="/nothing")
    fs = SFTPFilesystem(
        cast("Connection", connection), spec, loop=Loop(), limit=10, listing_bytes=1 << 20, resumed=False
    )
    assert fs.loop.run(fs.read(ROOT_INO, Fh(0), 0, 11)) == b"x" * 11
    for _ in range(2):
        assert error_of(lambda: fs.loop.run(fs.read(ROOT_INO, Fh(0), 0, 10))) == errno.EIO
    fs.loop.close()
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("the server answers READ with more than was asked for", None)
