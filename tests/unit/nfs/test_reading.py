"""What a server answers to READ that no server should."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation
from datastore.fuse.loop import Loop
from datastore.fuse.nfs.calls import Read
from datastore.fuse.nfs.client import Client, Credentials
from datastore.fuse.nfs.filesystem import NFSFilesystem
from datastore.fuse.ops import ROOT_INO, Fh
from tests.mount.mounts import error_of

LIMIT = 64
"""Bytes that the server says it gives at once."""


def filesystem(state: Path, contents: Sequence[bytes]) -> NFSFilesystem:
    """Of a server that answers every READ by the next one of these."""
    left = iter(contents)

    def answer(*_: object) -> Read:
        return Read(next(left), end=False, attributes=None)

    def gather(requests: Sequence[object], _: object) -> list[Read]:
        return [answer() for _ in requests]

    client: Any = SimpleNamespace(
        root=b"root", owner=Credentials(0, 0), reconnects=0, sizes=lambda: (LIMIT, LIMIT), gather=gather, call=answer
    )
    source = NFSLocation(server="h", path="/p")
    spec = MountSpec(name="n", mountpoint="/m", source=source, state_dir=str(state), cache_dir="/nothing")
    return NFSFilesystem(cast("Client", client), spec, loop=Loop(), limit=10, resumed=False)


@pytest.mark.parametrize(
    ("contents", "size"), [([b"x" * 11], 10), ([b"x" * 4, b"x" * 7], 10), ([b"x" * LIMIT, b"x" * 37], LIMIT + 36)]
)
def test_an_answer_that_is_longer_than_what_was_asked_for_is_eio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, contents: list[bytes], size: int
) -> None:
    """Told in one line, which is no defect of ours: be it the first answer, or that to what a short one left."""
    fs = filesystem(tmp_path, contents)
    assert error_of(lambda: fs.loop.run(fs.read(ROOT_INO, Fh(0), 0, size))) == errno.EIO
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("the server answers READ with more than was asked for", None)
    fs.loop.close()


def test_what_comes_in_short_answers_is_put_together(tmp_path: Path) -> None:
    fs = filesystem(tmp_path, [b"abcd", b"efghij"])
    assert fs.loop.run(fs.read(ROOT_INO, Fh(0), 0, 10)) == b"abcdefghij"
    fs.loop.close()
