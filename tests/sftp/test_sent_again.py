"""What the kernel sends again, though the server that died has done it. Without a mount, on a real SSH server."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from datastore.fuse.kernel import abi, wire
from datastore.fuse.kernel.dispatch import Header, Operation, call_again
from datastore.fuse.ops import ROOT_INO, Caller, Fh, Ino, Notifier, OpenRequest
from datastore.fuse.sftp.filesystem import SFTPFilesystem
from tests.driving import resolve
from tests.mount.mounts import fails
from tests.patience import eventually
from tests.promises import promise
from tests.sftp.mounts import unmounted
from tests.sftp.sshd import SSHServer

pytestmark = [pytest.mark.plain_user, pytest.mark.timeout(300)]
ME = Caller(0, 0, os.getpid())
READING = OpenRequest(flags=os.O_RDONLY)


def known(fs: SFTPFilesystem, parent: Ino, name: bytes) -> Ino:
    attr = resolve(fs.lookup(ME, parent, name)).attr
    assert attr is not None
    return attr.ino


def content(fs: SFTPFilesystem, ino: Ino) -> bytes:
    handle = resolve(fs.open(ME, ino, READING)).fh
    return resolve(fs.read(ino, handle, 0, 100))


def renamed_again(fs: SFTPFilesystem, old: bytes, new: bytes) -> None:
    """As the session does, of names in the root."""
    operation = SimpleNamespace(method=fs.rename)
    header: Header = (0, abi.RENAME, abi.UNIQUE_RESEND | 2, ROOT_INO, 0, 0, os.getpid(), 0, 0)
    resolve(
        call_again(cast(Operation, operation), header, (ME, ROOT_INO), wire.RenameRequest(old, ROOT_INO, new, 0), fs)
    )


@promise("S-276")
def test_a_rename_is_followed_that_a_server_carried_out_before_it_died(sshd: SSHServer, tmp_path: Path) -> None:
    """Files and what lies below directories are found under the numbers that the kernel has."""
    served = tmp_path / "served"
    (served / "directory").mkdir(parents=True)
    (tmp_path / "state").mkdir()
    (served / "old").write_bytes(b"of old")
    (served / "replaced").write_bytes(b"of replaced")
    (served / "directory" / "below").write_bytes(b"of below")
    with unmounted(sshd, tmp_path / "served", tmp_path / "state", resumed=False) as first:
        old, replaced, directory = (known(first, ROOT_INO, name) for name in (b"old", b"replaced", b"directory"))
        below = known(first, directory, b"below")
    (served / "old").rename(served / "replaced")
    (served / "directory").rename(served / "moved")
    with unmounted(sshd, tmp_path / "served", tmp_path / "state", resumed=True) as second:
        renamed_again(second, b"old", b"replaced")
        renamed_again(second, b"directory", b"moved")
        assert content(second, old) == b"of old"
        assert content(second, below) == b"of below"
        fails(errno.ESTALE, content, second, replaced)
        assert known(second, ROOT_INO, b"replaced") == old


@promise("S-276")
def test_a_rename_of_what_is_not_there_any_more_changes_nothing(sshd: SSHServer, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "served" / "old").write_bytes(b"of old")
    with unmounted(sshd, tmp_path / "served", tmp_path / "state", resumed=False) as first:
        old = known(first, ROOT_INO, b"old")
    (tmp_path / "served" / "old").unlink()
    with unmounted(sshd, tmp_path / "served", tmp_path / "state", resumed=True) as second:
        renamed_again(second, b"old", b"new")
        fails(errno.ENOENT, content, second, old)


@promise("S-276", "S-274")
@pytest.mark.parametrize("how", ["open", "create"])
def test_an_open_that_was_done_and_not_answered_is_done_once(sshd: SSHServer, tmp_path: Path, how: str) -> None:
    """The kernel sends it again to the next server, and closes it once: what is removed meanwhile goes with that."""
    served, state = tmp_path / "served", tmp_path / "state"
    served.mkdir()
    state.mkdir()
    (served / "f").write_bytes(b"x")
    caller, writes = ME._replace(request=8), OpenRequest(flags=os.O_RDWR | os.O_CREAT)

    def opened(fs: SFTPFilesystem) -> Fh:
        if how == "open":
            return resolve(fs.open(caller, known(fs, ROOT_INO, b"f"), READING)).fh
        return resolve(fs.create(caller, ROOT_INO, b"f", 0o644, writes))[1].fh

    with unmounted(sshd, served, state, resumed=False) as first:
        opened(first)
    with unmounted(sshd, served, state, resumed=True) as second:
        handle, ino = opened(second), known(second, ROOT_INO, b"f")
        resolve(second.unlink(ME, ROOT_INO, b"f"))
        assert len(list(served.iterdir())) == 1
        resolve(second.release(ino, handle))
        assert list(served.iterdir()) == []


@promise("S-274")
def test_a_hidden_name_that_can_not_be_removed_is_tried_again(sshd: SSHServer, tmp_path: Path) -> None:
    """By the last close, by the end of the mount, and by the next mount with its state directory."""
    served, state = tmp_path / "served", tmp_path / "state"
    served.mkdir()
    state.mkdir()

    def removed_while_open(fs: SFTPFilesystem) -> Path:
        """The hidden name, and in its place a directory, which SFTP does not remove as a file."""
        (served / "f").write_bytes(b"x")
        ino = known(fs, ROOT_INO, b"f")
        handle = resolve(fs.open(ME, ino, READING)).fh
        resolve(fs.unlink(ME, ROOT_INO, b"f"))
        (hidden,) = served.glob(".sftp*")
        hidden.unlink()
        hidden.mkdir()
        resolve(fs.release(ino, handle))
        assert hidden.is_dir()
        return hidden

    def can_be_removed(hidden: Path) -> None:
        hidden.rmdir()
        hidden.write_bytes(b"x")

    with unmounted(sshd, served, state) as first:
        hidden = removed_while_open(first)
        can_be_removed(hidden)
    assert not hidden.exists()
    assert not (state / "mount-id").exists(), "a node may forget this mount"
    with unmounted(sshd, served, state) as second:
        hidden = removed_while_open(second)
    assert (state / "mount-id").exists(), "a node has to keep what the next mount needs"
    can_be_removed(hidden)
    with unmounted(sshd, served, state) as third:
        third.start(Notifier())
        eventually(lambda: not hidden.exists(), "the next mount removes it")
