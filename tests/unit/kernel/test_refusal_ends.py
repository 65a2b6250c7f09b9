"""A device that is no more, as the supervisor's Refusal sees it."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from datastore.fuse.supervisor.outage import Refusal
from tests.promises import promise


@promise("S-61")
@pytest.mark.parametrize(
    ("number", "goes_on"),
    [(errno.ENODEV, False), (errno.ECONNABORTED, False), (errno.ENOENT, True), (errno.ENOMEM, True)],
)
def test_nobody_is_refused_where_nothing_is_mounted(
    monkeypatch: pytest.MonkeyPatch, number: int, goes_on: bool
) -> None:
    """The supervisor learns of it, and neither fails nor turns in circles."""
    supervisor, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def refused(fd: int, frame: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refused)
    monkeypatch.setattr(os, "readv", lambda fd, buffers: _fail(number, supervisor))
    with supervisor, kernel:
        kernel.send(b"x")
        assert Refusal(supervisor.fileno(), resend=True).answer(0.02) is goes_on


@promise("S-61", "S-153")
def test_a_device_that_can_not_be_read_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without memory is no unmount, and is not asked in circles."""
    supervisor, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked: list[int] = []

    def failing(fd: int, buffers: object) -> int:
        asked.append(fd)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "readv", failing)
    with supervisor, kernel:
        kernel.send(b"x")
        assert Refusal(supervisor.fileno(), resend=False).answer(0.05)
    assert len(asked) == 1


def _fail(number: int, device: socket.socket) -> int:
    device.recv(1)
    raise OSError(number, os.strerror(number))
