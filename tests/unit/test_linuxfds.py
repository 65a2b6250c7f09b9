"""The descriptors that a Python compiled for an older Linux does not offer."""

from __future__ import annotations

import errno
import os
import select
import subprocess

import pytest

from datastore.linuxfds import memfd, pidfd


@pytest.fixture(params=["this Python", "one for an older Linux"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "this Python":
        for name in ("memfd_create", "pidfd_open"):
            monkeypatch.delattr(os, name, raising=False)


def test_a_file_in_memory_is_on_no_disk_and_not_inherited() -> None:
    fd = memfd("opens")
    try:
        os.write(fd, b"content")
        assert os.pread(fd, 10, 0) == b"content"
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:opens")
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_process_becomes_readable_when_it_ends() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        fd = pidfd(process.pid)
        try:
            assert select.select([fd], [], [], 0)[0] == []
            assert process.stdin is not None
            process.stdin.close()
            assert select.select([fd], [], [], 30)[0] == [fd]
        finally:
            os.close(fd)
    with pytest.raises(ProcessLookupError) as raised:
        pidfd(process.pid)
    assert raised.value.errno == errno.ESRCH
