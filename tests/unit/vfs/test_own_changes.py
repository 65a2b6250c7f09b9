"""What we change while attributes are on their way is not undone by those; each race made to happen (S-29)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from stat import S_IMODE
from typing import Any

import pytest

from datastore.fuse.ops import SetAttr
from datastore.fuse.store.base import ObjectStore
from datastore.fuse.vfs.lookup import resolver
from datastore.fuse.vfs.tree import facts
from datastore.fuse.vfs.tree.nodes import Node
from tests.driving import beside, resolve
from tests.mounted import Client, World
from tests.patience import PATIENCE_S, passed

BOTH_LISTINGS = True
TWO_PAGES = 1500


def after_the_next(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, method: str, do: Callable[[], object]) -> None:
    """Between its answer and who asked for it."""
    original, calls = getattr(store, method), iter((True,))

    async def answered(*arguments: Any, **options: Any) -> Any:
        answer = await original(*arguments, **options)
        if next(calls, False):
            await beside(do)
        return answer

    monkeypatch.setattr(store, method, answered)


def mode_of(client: Client, path: str) -> int:
    """Its permissions."""
    return S_IMODE(client.local.stat(path).mode)


@pytest.mark.parametrize("many", [False, True])
def test_a_head_older_than_a_chmod_does_not_undo_it(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """A copy onto itself leaves the etag as it was."""
    for name in "ab":
        world.put(f"d/{name}", b"x", mode=str(0o100644))
    world.later(5)
    nodes = [one.node(f"d/{name}") for name in "ab"]
    world.later(5)
    after_the_next(monkeypatch, one.store, "head", partial(one.local.chmod, "d/a", 0o600))
    asked = nodes if many else nodes[:1]
    for node in asked:
        facts.doubted(node, attributes=True)
    resolve(one.fs.resolver.make_exact(asked))
    assert mode_of(one, "d/a") == 0o600
    one.local.setattr("d/a", SetAttr(uid=7))
    assert int(world.metadata("d/a")["mode"]) & 0o777 == 0o600


def test_a_head_undoes_no_newer_chmod_of_a_directory(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.local.mkdir("d", 0o755)
    world.later(5)
    node = one.node("d")
    world.later(5)
    after_the_next(monkeypatch, one.store, "head", partial(one.local.chmod, "d", 0o700))
    resolve(one.fs.remote.head(node))
    assert mode_of(one, "d") == 0o700


@pytest.mark.parametrize("changed", ["top", "top/d"])
def test_a_listing_undoes_no_chmod(world: World, one: Client, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """Else who touches a directory again and again keeps all from reading what is below (EBUSY in the end)."""
    for path in ("top", "top/d"):
        one.local.mkdir(path, 0o755)
    world.put_all(f"top/d/{number:04}" for number in range(TWO_PAGES))
    world.later()
    one.local.stat("top/d")
    before = one.calls("list_page")

    def chmod() -> None:
        world.clock.advance(0.01)
        one.local.chmod(changed, 0o700)

    after_the_next(monkeypatch, one.store, "list_page", chmod)
    assert len(one.local.listdir("top/d")) == TWO_PAGES
    assert one.calls("list_page") == before + 2
    assert mode_of(one, changed) == 0o700


def test_a_chmod_beside_a_head_does_not_repeat_it(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    one.local.mkdir("d", 0o755)
    world.put("d/a", b"x", mode=str(0o100640))
    world.later()
    node = one.node("d/a")
    before = one.calls("head")
    after_the_next(monkeypatch, one.store, "head", partial(one.local.chmod, "d", 0o700))
    assert resolve(one.fs.remote.head(node))
    assert one.calls("head") == before + 2, "once for the chmod, which asks what it goes on from (S-161)"
    assert mode_of(one, "d/a") == 0o640


def test_attributes_asked_for_ahead_undo_no_chmod(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for those of many files takes in what came for the first long after it came."""
    for name in "ab":
        world.put(f"d/{name}", b"x", mode=str(0o100644))
    world.later(5)
    nodes = [one.node(f"d/{name}") for name in "ab"]
    world.later(5)
    parent = nodes[0].parent
    assert parent is not None
    original, collected, asked, go_on = one.faulty.head, *(threading.Event() for _ in range(3))

    async def held(key: str) -> Any:
        await passed(collected)
        if key == "d/b":
            asked.set()
            await passed(go_on)
        return await original(key)

    ahead = one.fs.resolver._prefetcher
    told = ahead.told

    async def waiting(nodes: Iterable[Node]) -> list[Node]:
        collected.set()
        return await told(nodes)

    monkeypatch.setattr(one.faulty, "head", held)
    monkeypatch.setattr(ahead, "told", waiting)
    for node in nodes:
        facts.doubted(node, attributes=True)
        one.fs.core.known.forget(node.key)
    listing = resolve(one.fs.resolver.read_directory(parent))
    one.fs.loop.call(lambda: ahead.coming(parent.key, list(listing.entries.values())))
    reader = threading.Thread(target=lambda: resolve(one.fs.resolver.make_exact(nodes)))
    reader.start()
    assert asked.wait(PATIENCE_S)
    with one.local.opened("d/a", os.O_RDWR) as file:
        file.write(b"new")
        one.local.chmod("d/a", 0o600)
        go_on.set()
        reader.join(PATIENCE_S)
        assert mode_of(one, "d/a") == 0o600
    assert int(world.metadata("d/a")["mode"]) & 0o777 == 0o600


def test_the_changes_that_are_remembered_are_limited(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a directory that nobody lists; what a listing under way may not know stays, however much it is."""
    monkeypatch.setattr(resolver, "_CHANGED_MAX", 3)
    one.local.mkdir("d")
    one.ask_one_by_one("d")
    node = one.folder("d")
    for number in range(6):
        world.later(600)
        one.local.write(f"d/{number}", b"")
    assert list(node.changed) == [b"3", b"4", b"5"]
    for number in range(6, 9):
        one.local.write(f"d/{number}", b"")
    assert list(node.changed) == [b"5", b"6", b"7", b"8"]
