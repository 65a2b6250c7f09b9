"""Who opens or reads a file while a rename replaces it, or a removal takes it, gets the old or the new (S-23, S-25)."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from datastore.fuse.ops import FSError, Ino, OpenRequest
from datastore.fuse.vfs.tree import chases
from tests.driving import resolve
from tests.localfs import ME
from tests.mounted import Client, around
from tests.patience import PATIENCE_S
from tests.promises import promise


def opened_as_the_kernel_does(client: Client, path: str) -> bytes:
    """open(2) and read: after ESTALE from the open the path is walked once more, and not again."""
    for last in (False, True):
        try:
            file = client.local.open(path)
        except OSError as error:
            if error.errno != errno.ESTALE or last:
                raise
            continue
        content = file.read()
        file.close()
        return content
    raise AssertionError


@promise("S-25")
def test_an_open_while_a_rename_replaces_the_file(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """Nobody keeps the old bytes for one who comes then: he waits, and has the new ones."""
    one.world.put("target", b"old")
    one.local.write("new", b"new!")
    assert one.local.read("target") == b"old"
    one.fs.core.reader.forget(one.fs.core.nodes.by_ino[one.local.stat("target").ino].version())
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(opened_as_the_kernel_does(one, "target")))

    def come() -> None:
        reader.start()
        reader.join(0.2)

    around(monkeypatch, one, "copy", come, lambda: None)
    one.local.rename("new", "target")
    reader.join(PATIENCE_S)
    assert found == [b"new!"]


@promise("S-25")
def test_a_file_that_was_replaced_after_it_was_looked_up(one: Client) -> None:
    """The open says so, upon which the kernel looks again; a read could only fail."""
    one.local.write("target", b"old")
    one.local.write("new", b"new!")
    ino = one.local.stat("target").ino
    one.local.rename("new", "target")
    with pytest.raises(FSError) as caught:
        resolve(one.fs.open(ME, ino, OpenRequest(flags=os.O_RDONLY)))
    assert caught.value.errno == errno.ESTALE
    assert one.local.read("target") == b"new!"


@promise("S-23", "S-25")
@pytest.mark.parametrize("how", ["replaced", "removed", "removed, large"])
def test_a_read_while_its_file_goes(monkeypatch: pytest.MonkeyPatch, one: Client, how: str) -> None:
    """Its request comes too late, but the bytes are kept."""
    one.world.put("target", b"old")
    one.local.write("new", b"new!")
    if how == "removed, large":
        one.keep_small_copies_only(1)
    with one.local.opened("target") as file:
        if how == "replaced":
            one.local.rename("new", "target")
        else:
            one.local.unlink("target")
        monkeypatch.setattr(one.fs.core.reader, "held", lambda *_: None)
        assert bytes(resolve(one.fs.read(Ino(file.ino), file._fh, 0, 3))) == b"old"


def lose(one: Client) -> None:
    """An open that comes after a rename has taken the name: the kernel would walk the path again."""
    for name in ("target", "new", "newer"):
        one.local.write(name, name.encode())
    ino = one.local.stat("target").ino
    one.local.rename("new", "target")
    with pytest.raises(FSError):
        resolve(one.fs.open(ME, ino, OpenRequest(flags=os.O_RDONLY)))


@promise("S-25")
def test_an_open_does_not_lose_twice(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel walks a path again only once: the next rename lets it pass."""
    monkeypatch.setattr(chases, "PATIENCE_S", 2 * PATIENCE_S)
    lose(one)

    second = threading.Thread(target=one.local.rename, args=("newer", "target"))
    second.start()
    second.join(0.2)
    waited = second.is_alive()
    content = one.local.read("target")
    second.join(PATIENCE_S)

    assert waited
    assert content == b"new"
    assert one.local.read("target") == b"newer"


@promise("S-25")
def test_who_does_not_come_back_is_not_waited_for_long(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor who came for a name that is gone."""
    monkeypatch.setattr(chases, "PATIENCE_S", 0.05)
    lose(one)
    one.local.rename("newer", "target")

    monkeypatch.setattr(chases, "PATIENCE_S", 2 * PATIENCE_S)
    ino = one.local.stat("target").ino
    one.local.unlink("target")
    with pytest.raises(FSError):
        resolve(one.fs.open(ME, ino, OpenRequest(flags=os.O_RDONLY)))
    one.local.write("other", b"other")
    began = time.monotonic()
    one.local.rename("other", "target")
    assert time.monotonic() - began < PATIENCE_S
