"""Readonly mounts: the kernel opens files by itself, and what another client changed is a new inode (S-51)."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from datastore.fuse.ops import Fh, OpenRequest
from datastore.fuse.vfs.opened import handles
from tests.driving import resolve
from tests.localfs import ME
from tests.mounted import TTL_S, Client, World, failing
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise

MIB = 1 << 20
BODY = random.Random(4).randbytes(9 * MIB)


@pytest.fixture
def reader(world: World) -> Client:
    return world.client(read_only=True, attributes="listing")


@promise("S-51")
def test_opens_and_flushes_are_left_to_the_kernel(world: World, reader: Client) -> None:
    world.put("f", b"one")
    ino = reader.local.stat("f").ino
    request = OpenRequest(flags=os.O_RDONLY)
    failing(errno.ENOSYS, lambda: resolve(reader.fs.open(ME, ino, request)))
    failing(errno.ENOSYS, lambda: resolve(reader.fs.flush(ino, Fh(0))))


@promise("S-51", "S-30")
def test_a_changed_file_is_another_inode_and_the_old_one_keeps_its_version(world: World, reader: Client) -> None:
    world.put("f", BODY[: 2 * MIB])
    old = reader.local.open("f")
    assert old.read(0, 10) == BODY[:10]
    before = reader.local.stat("f").ino

    world.put("f", BODY[MIB : 3 * MIB])
    world.later(TTL_S + 1)
    assert reader.local.stat("f").ino != before
    assert reader.local.open("f").read(0, 10) == BODY[MIB : MIB + 10]
    assert old.read(MIB, 10) == BODY[MIB : MIB + 10], "held locally"


@promise("S-51", "S-147")
def test_a_file_of_the_same_size_that_was_never_read_here_goes_on(world: World, reader: Client) -> None:
    """Nobody has a byte of the old version, nor another size."""
    world.put("f", b"one")
    before = reader.local.open("f")
    world.put("f", b"two")
    world.later(TTL_S + 1)
    assert reader.local.stat("f").ino == before.ino
    assert before.read() == reader.local.read("f") == b"two"
    world.put("f", b"six")
    world.later(TTL_S + 1)
    assert reader.local.stat("f").ino != before.ino
    assert before.read() == b"two", "held locally"
    assert reader.local.read("f") == b"six"


def kept(client: Client, ino: int) -> bool:
    """Whether the disk has the whole version of a file, also for the next server; its readers do not wait for that."""
    core = client.fs.core
    assert core.cache is not None
    return core.cache.present(core.nodes.by_ino[ino].version())


@promise("S-51", "S-41")
def test_a_new_server_goes_on_with_the_version_that_was_read(world: World, reader: Client) -> None:
    world.put("f", BODY[: 2 * MIB])
    old = reader.local.open("f")
    assert old.read(0, 10) == BODY[:10]
    eventually(lambda: kept(reader, old.ino), "the disk has what was read")
    after = reader.again(resumed=True)
    world.put("f", bytes(2 * MIB))
    world.later(TTL_S + 1)
    assert bytes(resolve(after.fs.read(old.ino, Fh(0), MIB, 10))) == BODY[MIB : MIB + 10]


def test_the_readers_that_are_remembered_are_limited(
    world: World, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "_UNOPENED_MAX", 8)
    world.put_all(f"f{number}" for number in range(30))
    for number in range(30):
        assert reader.local.open(f"f{number}").read(0, 10) == b"x"
    assert len(reader.fs.core.opens.load()) <= 8
    assert len(reader.fs.handles._by_fh) <= 8


class Interfered(OrderedDict[int, handles.Handle]):
    """A table into which another request comes between a look and what is done upon it, unless that is kept from it."""

    def __init__(self, table: OrderedDict[int, handles.Handle], interfere: Callable[[], object]) -> None:
        super().__init__(table)
        self._thread = threading.Thread(target=interfere)

    def get(self, fh: int, default: object = None) -> Any:
        found = super().get(fh)
        if fh and self._thread.ident is None:
            self._thread.start()
            self._thread.join(0.3)
        return found


@promise("S-51")
@pytest.mark.parametrize("known", [True, False], ids=["evicted", "added"])
def test_a_read_survives_a_change_of_its_handle_meanwhile(world: World, reader: Client, known: bool) -> None:
    world.put("f", BODY[:MIB])
    file = reader.local.open("f")
    table = reader.fs.handles
    if known:
        assert file.read(0, 10) == BODY[:10]

    def interfere() -> None:
        if known:
            table.remove(Fh(file.ino))
        elif file.ino not in table._by_fh:
            table.add_unopened(reader.fs.core.nodes.by_ino[file.ino])

    table._by_fh = Interfered(table._by_fh, lambda: reader.fs.loop.call(interfere))
    assert file.read(10, 10) == BODY[10:20]
    table._by_fh._thread.join(PATIENCE_S)
    assert reader.fs.core.nodes.by_ino[file.ino].handles == (file.ino in table._by_fh) <= 1
