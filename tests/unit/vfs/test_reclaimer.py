"""The ceiling of memory: what is let go of, what stays, and that nobody notices."""

from __future__ import annotations

import os

import pytest

from datastore.fuse.vfs.tree import reclaimer
from datastore.fuse.vfs.tree.nodes import Directory
from datastore.fuse.vfs.tree.reclaimer import MIB, MemoryReclaimer, Shares
from tests.driving import resolve
from tests.mounted import Client, World
from tests.promises import promise

FOLDERS, FILES = 6, 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, world: World) -> Client:
    """A client whose share for names holds about two of six folders."""
    world.put_all((f"d{folder}/f{number:02}" for folder in range(FOLDERS) for number in range(FILES)), b"")
    shares = Shares(names=2 * FILES * (reclaimer.NODE_BYTES + reclaimer.ENTRY_BYTES), pieces=MIB, attributes=10)
    monkeypatch.setattr(Shares, "of", lambda _: shares)
    monkeypatch.setattr(reclaimer, "_GROWN", 1)
    return world.client(attributes="listing", ttl_s=60.0)


def walk(client: Client) -> None:
    """As `find -ls` does: the kernel keeps every node."""
    for folder in range(FOLDERS):
        client.local.scandir(f"d{folder}", plus=True)


def listed(client: Client) -> int:
    """Directories whose listing is held."""
    nodes = client.fs.core.nodes.by_ino.values()
    return sum(isinstance(node, Directory) and node.listing is not None for node in nodes)


def kernel_gives_up(client: Client) -> None:
    """What was released is forgotten, as the kernel does with what nobody uses."""
    for one in client.kernel.released:
        client.fs.forget(one.ino, 1000)
    client.kernel.released.clear()


@promise("S-55")
def test_nodes_of_directories_that_were_not_used_for_longest_are_released(small: Client) -> None:
    """The kernel is asked to give up the nodes of the directories that were not used for longest.

    A directory is not detached by name: a process may stand in it, so the kernel can only be asked to prune it.
    """
    small.world.put("d0/inner/f")
    walk(small)
    nodes = small.fs.core.nodes.by_ino
    before, directories = len(nodes), {node.ino for node in nodes.values() if isinstance(node, Directory)}
    resolve(MemoryReclaimer(small.fs.core).look(0))
    assert listed(small) < FOLDERS
    assert {one.name for one in small.kernel.released if one.ino in directories} == {b""}
    kernel_gives_up(small)
    assert len(nodes) < before / 2
    last = small.local.stat(f"d{FOLDERS - 1}")
    assert sum(node.parent is not None and node.parent.ino == last.ino for node in nodes.values()) == FILES
    walk(small)
    assert small.local.stat("d0/f00").size == 0


@promise("S-55")
def test_what_is_in_use_is_not_released(small: Client) -> None:
    """Open files, open directories and what the store has not seen."""
    file = small.local.open("d0/f00")
    small.local.scandir("d1")
    ino = small.local.stat("d1").ino
    handle = resolve(small.fs.opendir(small.local._caller, ino)).fh
    walk(small)
    resolve(MemoryReclaimer(small.fs.core).look(0))
    assert file.ino not in {one.ino for one in small.kernel.released}
    assert small.folder("d1").listing is not None
    small.fs.releasedir(ino, handle)
    file.close()


@promise("S-55")
def test_nodes_that_the_kernel_never_had_go_when_they_are_idle(small: Client) -> None:
    """Those of a warm-up, or of attributes that were asked for ahead."""
    for folder in range(FOLDERS):
        directory = resolve(small.fs.resolver.find(small.fs.core.nodes.root, b"d%d" % folder))
        assert isinstance(directory, Directory)
        for number in range(FILES):
            resolve(small.fs.resolver.find(directory, b"f%02d" % number))
    look = MemoryReclaimer(small.fs.core)
    before = len(small.fs.core.nodes.by_ino)
    resolve(look.look(0))
    assert len(small.fs.core.nodes.by_ino) == before
    small.world.clock.advance(10)
    small.fs.core.nodes.grown = 1
    resolve(look.look(0))
    assert len(small.fs.core.nodes.by_ino) < before


@promise("S-55")
def test_pressure_tightens_and_its_end_loosens(small: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process is near its ceiling, whatever it is that takes the room."""
    limits: list[int] = []
    monkeypatch.setattr(small.fs.core.reader.table, "limit", limits.append)
    look = MemoryReclaimer(small.fs.core)
    of = small.fs.core.settings.memory_bytes
    for resident in (of // 2, of, of, of // 10 * 8, of // 2, of // 2):
        resolve(look.look(resident))
    assert limits == [MIB // 4, MIB]


@promise("S-41", "S-55")
def test_the_log_of_nodes_says_what_the_kernel_has(small: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given up is not restored, and the log does not grow for ever."""
    walk(small)
    resolve(MemoryReclaimer(small.fs.core).look(0))
    kernel_gives_up(small)
    small.local.stat("d0/f00")
    again = small.again(resumed=True)
    nodes = again.fs.core.nodes.by_ino
    assert len(nodes) < FOLDERS * FILES
    assert {node.ino for node in nodes.values()} >= {again.local.stat("d0/f00").ino}
    monkeypatch.setattr(reclaimer, "_LOG_SLACK", 0)
    monkeypatch.setattr(reclaimer, "_LOG_RATIO", 1)
    resolve(MemoryReclaimer(again.fs.core).look(0))
    assert again.fs.core.nodelog.records <= len(again.fs.core.nodes.by_ino)


@promise("S-41", "S-55")
def test_names_that_come_and_go_leave_a_small_log(world: World) -> None:
    """Of thousands of names, of which few live, a few thousand records stay."""
    client = world.client(ttl_s=60.0)
    core, look = client.fs.core, MemoryReclaimer(client.fs.core)
    world.put("f")
    node = client.node("f")
    for _ in range(8):
        for _ in range(1000):
            core.log_nodes((node,))
        resolve(look.look(0))
    assert core.nodelog.records <= 5500
    assert set(core.nodelog.load()) == {node.ino}


@promise("S-12")
def test_what_this_mount_removes_is_forgotten_on_disk(world: World) -> None:
    """The rows of objects that it removed or renamed go: the database does not grow with every name ever used."""
    client, names = world.client(), ("kept", "removed", "renamed", "replaced", "d/inside")
    core = client.fs.core
    for name in names:
        world.put(name, mode="33188")
    world.clock.advance(10)
    for name in names:
        client.local.stat(name)
    resolve(core.known.save())
    assert core.db.attributes("removed") is not None
    client.local.unlink("removed")
    client.local.rename("renamed", "replaced")
    client.local.rename("d", "e")
    resolve(core.known.save())
    assert core.db.attributes("kept") is not None
    assert [name for name in ("removed", "renamed", "d/inside") if core.db.attributes(name) is not None] == []


@promise("S-19", "S-44")
def test_unsent_files_are_found_among_those_that_are_staged(world: World) -> None:
    """The look for them, once a second, takes as long as there are staging files, not as there are nodes."""
    client = world.client()
    for name in ("a", "b"):
        client.local.write(name, b"x")
    nodes = client.fs.core.nodes
    file = client.local.open("c", os.O_CREAT | os.O_WRONLY)
    file.write(b"more")
    assert [node.name for node in nodes.unsent()] == [b"c"]
    assert [node.name for node in nodes.staged] == [b"c"]
    told = reclaimer.holdings(client.fs.core)
    assert (told["staged"], told["nodes"]) == (1, 4)
    file.close()
    assert not nodes.unsent()
    assert not nodes.staged
