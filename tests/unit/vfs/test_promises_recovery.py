"""What holds for renames that were cut off (docs/SEMANTICS.md): the process dies at every call in turn."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from datastore.errors import ServerFault
from tests.faulty import from_nth, no_faults
from tests.mounted import Client, Died, World, dies_at

DOWN = ServerFault("the server is down")


def everything(world: World) -> dict[str, bytes]:
    """What is in the bucket, without markers."""
    return {key: world.body(key) for key in world.all_keys() if not key.endswith("/")}


def _file(world: World, client: Client, top: str) -> Callable[[], None]:
    world.put(f"{top}/a", b"bytes", origin="camera")
    return lambda: client.local.rename(f"{top}/a", f"{top}/b")


def _replacing(world: World, client: Client, top: str) -> Callable[[], None]:
    world.put(f"{top}/b", b"older")
    return _file(world, client, top)


def _over_a_link(world: World, client: Client, top: str) -> Callable[[], None]:
    world.put(f"{top}/b.rclonelink", b"elsewhere")
    return _file(world, client, top)


def _link_over_a_file(world: World, client: Client, top: str) -> Callable[[], None]:
    world.put(f"{top}/b", b"older")
    world.put(f"{top}/a.rclonelink", b"elsewhere")
    return lambda: client.local.rename(f"{top}/a", f"{top}/b")


def _directory(world: World, client: Client, top: str) -> Callable[[], None]:
    for name in ("x", "y/z"):
        world.put(f"{top}/a/{name}", name.encode())
    return lambda: client.local.rename(f"{top}/a", f"{top}/b")


def _unsent(world: World, client: Client, top: str) -> Callable[[], None]:
    world.put(f"{top}/a", b"bytes")
    client.local.open(f"{top}/a", os.O_RDWR).write(b"B")
    return lambda: client.local.rename(f"{top}/a", f"{top}/b")


Begin = Callable[[World, Client, str], Callable[[], None]]
Contents = dict[str, bytes]
STATES: dict[Begin, tuple[Contents, Contents]] = {
    _file: ({"a": b"bytes"}, {"b": b"bytes"}),
    _replacing: ({"a": b"bytes", "b": b"older"}, {"b": b"bytes"}),
    _directory: ({"a/x": b"x", "a/y/z": b"y/z"}, {"b/x": b"x", "b/y/z": b"y/z"}),
    _over_a_link: ({"a": b"bytes", "b.rclonelink": b"elsewhere"}, {"b": b"bytes"}),
    _link_over_a_file: ({"a.rclonelink": b"elsewhere", "b": b"older"}, {"b.rclonelink": b"elsewhere"}),
    _unsent: ({"a": b"Bytes"}, {"b": b"Bytes"}),
}


@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__.strip("_"))
def test_a_rename_that_was_cut_off_is_finished_by_the_next_mount(world: World, kind: Begin) -> None:
    """S-27 at whatever call the process dies: before the rename was written down all is old, afterwards all is new."""
    before, after = STATES[kind]
    seen = []
    for number in range(30):
        top = f"top{number}"
        client = world.client()
        rename = kind(world, client, top)
        client.local.stat(f"{top}/a")
        client.faulty.plan = dies_at(len(client.faulty.calls) + number)
        try:
            rename()
            done = True
        except Died:
            done = False
        again = client.again()
        found = {key[len(top) + 1 :]: body for key, body in everything(world).items() if key.startswith(top + "/")}
        assert found in (before, after), f"died at call {number}"
        assert again.fs.core.db.intents() == []
        seen.append(found == after)
        if done:
            break
    assert seen == sorted(seen)
    assert done
    assert not seen[0] or kind is _unsent
    assert len(seen) >= 3


@pytest.mark.parametrize("used", ["a", "b"])
@pytest.mark.parametrize("kind", [_file, _replacing, _directory, _unsent], ids=lambda kind: kind.__name__.strip("_"))
def test_a_name_that_is_used_anew_before_its_rename_is_finished(world: World, kind: Begin, used: str) -> None:
    """S-27 the store was away when the mount began: what was written since is neither moved nor removed later on."""
    anew = {f"{used}/x": b"newer", f"{used}/new": b"newer"} if kind is _directory else {used: b"newer"}
    for number in range(30):
        top = f"top{number}"
        client = world.client()
        rename = kind(world, client, top)
        client.local.stat(f"{top}/a")
        client.faulty.plan = dies_at(len(client.faulty.calls) + number)
        try:
            rename()
            done = True
        except Died:
            done = False
        again = client.again(plan=from_nth(0, DOWN))
        world.later()
        again.faulty.plan = no_faults
        if kind is _directory and not again.local.exists(f"{top}/{used}"):
            again.local.mkdir(f"{top}/{used}")
        for name, body in anew.items():
            again.local.write(f"{top}/{name}", body)
        assert again.fs.flush_all() == []
        last = again.again()
        found = {key[len(top) + 1 :]: body for key, body in everything(world).items() if key.startswith(top + "/")}
        assert {name: found.get(name) for name in anew} == anew, f"died at call {number}"
        assert last.fs.core.db.intents() == []
        if kind is _directory:
            assert b"y/z" in (found.get("a/y/z"), found.get("b/y/z"))
        if done:
            return
    raise AssertionError("a rename takes fewer calls")


def test_finishing_does_not_undo_what_others_wrote_since(world: World, one: Client) -> None:
    """S-27 a file below the new name that another client changed after the copy is not put back."""
    for name in "ab":
        world.put(f"d/{name}", b"old")
    one.local.listdir("d")

    def die_before_removal(index: int, method: str) -> None:
        if method == "delete_many":
            one.faulty.plan = dies_at(0)
            raise Died

    one.faulty.plan = die_before_removal
    with pytest.raises(Died):
        one.local.rename("d", "e")
    world.later()
    world.put("e/a", b"changed by another")
    one.again()
    assert everything(world) == {"e/a": b"changed by another", "e/b": b"old"}
