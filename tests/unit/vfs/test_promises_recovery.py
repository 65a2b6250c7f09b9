"""What holds for renames that were cut off (docs/SEMANTICS.md): the process dies at every call in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from datastore.fuse.state.statedb import StateDb
from datastore.fuse.vfs.upload import copies
from tests.driving import resolve
from tests.faulty import Fault, from_nth, no_faults
from tests.mounted import DOWN, Client, Died, World, dies_at, lived, pattern
from tests.promises import promise


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


def cut_off(world: World, kind: Begin, top: str, number: int) -> tuple[Client, bool]:
    """A rename below `top` by a process that dies at its numbered call: the process, and whether it was done before."""
    client = world.client()
    rename = kind(world, client, top)
    client.local.stat(f"{top}/a")
    client.faulty.plan = dies_at(len(client.faulty.calls) + number)
    return client, lived(rename)


def below(world: World, top: str) -> Contents:
    """What is in a directory, by another tool."""
    return {key.removeprefix(f"{top}/"): body for key, body in world.contents().items() if key.startswith(f"{top}/")}


@promise("S-27")
@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__.strip("_"))
def test_a_rename_that_was_cut_off_is_finished_by_the_next_mount(world: World, kind: Begin) -> None:
    """At whatever call the process dies: before the rename was written down all is old, afterwards all is new."""
    before, after = STATES[kind]
    seen = []
    for number in range(30):
        top = f"top{number}"
        client, done = cut_off(world, kind, top, number)
        again = client.again()
        found = below(world, top)
        assert found in (before, after), f"died at call {number}"
        assert again.fs.core.db.intents() == []
        seen.append(found == after)
        if done:
            break
    assert seen == sorted(seen)
    assert done
    assert not seen[0] or kind is _unsent
    assert len(seen) >= 3


@promise("S-27")
@pytest.mark.parametrize("used", ["a", "b"])
@pytest.mark.parametrize("kind", [_file, _replacing, _directory, _unsent], ids=lambda kind: kind.__name__.strip("_"))
def test_a_name_that_is_used_anew_before_its_rename_is_finished(world: World, kind: Begin, used: str) -> None:
    """The store was away when the mount began: what was written since is neither moved nor removed later on."""
    anew = {f"{used}/x": b"newer", f"{used}/new": b"newer"} if kind is _directory else {used: b"newer"}
    for number in range(30):
        top = f"top{number}"
        client, done = cut_off(world, kind, top, number)
        again = client.again(plan=from_nth(0, DOWN))
        world.later()
        again.faulty.plan = no_faults
        if kind is _directory and not again.local.exists(f"{top}/{used}"):
            again.local.mkdir(f"{top}/{used}")
        for name, body in anew.items():
            again.local.write(f"{top}/{name}", body)
        assert resolve(again.fs.flush_all()) == []
        last = again.again()
        found = below(world, top)
        assert {name: found.get(name) for name in anew} == anew, f"died at call {number}"
        assert last.fs.core.db.intents() == []
        if kind is _directory:
            assert b"y/z" in (found.get("a/y/z"), found.get("b/y/z"))
        if done:
            return
    raise AssertionError("a rename takes fewer calls")


def rename_dies(client: Client, old: str, new: str, last: str) -> None:
    """The process dies before the first call of a method of its store."""

    def die(index: int, method: str) -> None:
        if method == last:
            client.faulty.plan = dies_at(0)
            raise Died

    client.faulty.plan = die
    assert not lived(client.local.rename, old, new)


@promise("S-27")
@pytest.mark.parametrize("theirs", [None, b"changed by another"])
def test_finishing_does_not_undo_what_others_did_since(world: World, one: Client, theirs: bytes | None) -> None:
    """A copy that another client removed is made again, and no other; one that it changed is not put back.

    What it wrote to the old name is moved too, also in the very second of the copy that was made of it before.
    """
    world.put_all(["d/x", "d/y", "d/z"], b"old")
    one.local.listdir("d")
    rename_dies(one, "d", "e", "delete_many")
    world.put("d/z", b"newer")
    world.later()
    if theirs is None:
        world.tool.delete("e/y")
    else:
        world.put("e/y", theirs)
    last = one.again()
    assert last.calls("copy") == 1 + (theirs is None)
    assert world.contents() == {"e/x": b"old", "e/y": theirs or b"old", "e/z": b"newer"}


@promise("S-27")
@pytest.mark.parametrize("skew_s", [-3600, 3600])
@pytest.mark.parametrize("dies", ["copy", "delete_many"])
def test_a_directory_is_moved_by_the_stores_clock(world: World, one: Client, dies: str, skew_s: int) -> None:
    """What was there when the rename began is moved, and what came since is not, however wrong our clock is."""
    world.bucket._clock = lambda: world.clock.time_ns() + skew_s * 10**9
    world.put_all(["d/x", "d/y/z"], b"old")
    one.local.listdir("d")
    rename_dies(one, "d", "e", dies)
    waiting = one.again(plan=from_nth(0, DOWN))
    world.later()
    world.put_all(["d/x", "d/came"], b"newer")
    last = waiting.again()
    copied = {"e/x": b"old"} if dies == "delete_many" else {}
    assert world.contents() == {"d/x": b"newer", "d/came": b"newer", "e/y/z": b"old", **copied}
    assert last.fs.core.db.intents() == []


@promise("S-27")
@pytest.mark.parametrize("skew_s", [-3600, 3600])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_a_cut_off_replacement_is_finished_if_the_target_is_the_version_of_then(
    world: World, one: Client, used: bool, there: bool, skew_s: int
) -> None:
    """It is used anew if it is another version than the rename was to replace, however wrong our clock is."""
    world.bucket._clock = lambda: world.clock.time_ns() + skew_s * 10**9
    world.put("a", b"bytes")
    if there:
        world.put("b", b"older")
    one.local.listdir()
    rename_dies(one, "a", "b", "copy")
    waiting = one.again(plan=from_nth(0, DOWN))
    world.later()
    if used:
        world.put("b", b"newer")
    last = waiting.again()
    assert world.contents() == ({"a": b"bytes", "b": b"newer"} if used else {"b": b"bytes"})
    assert last.fs.core.db.intents() == []


@promise("S-27")
@pytest.mark.parametrize("theirs", [b"", b"of another size"])
def test_a_copy_in_parts_is_not_taken_for_what_another_client_wrote(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, theirs: bytes
) -> None:
    """It has another ETag than the file, and the same metadata and size."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    world.put("a", pattern(2000), origin="camera")
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "moved", Mock(side_effect=Died))
        assert not lived(one.local.rename, "a", "b")
    assert len(world.contents()) == 2
    waiting = one.again(plan=from_nth(0, DOWN))
    world.later()
    if theirs:
        world.put("b", theirs, origin="camera")
    waiting.again()
    assert world.contents() == ({"a": pattern(2000), "b": theirs} if theirs else {"b": pattern(2000)})


@promise("S-159")
def test_what_a_start_can_not_send_goes_where_its_directory_went(world: World, one: Client) -> None:
    """It is sent to the new name later, also by the mount after that, and nothing is made under the old one."""
    old = pattern(9 << 20)  # more than is fetched, and kept in the cache, for a write
    world.put_all(["d/f", "d/x"], old)
    one.local.open("d/f", os.O_RDWR).write(b"unsent")
    one.local.open("d/new", os.O_WRONLY | os.O_CREAT).write(b"unsent too")
    one.local.open("beside", os.O_WRONLY | os.O_CREAT).write(b"stays")
    rename_dies(one, "d", "e", "copy")
    waiting = one.again(plan=lambda index, method: Fault(DOWN) if method in ("put", "create_upload") else None)
    assert world.contents() == {"e/f": old, "e/x": old}
    assert sorted(str(row["path"]) for row in waiting.fs.uploads.unsent()) == ["beside", "e/f", "e/new"]
    last = waiting.again()
    sent = {"e/f": b"unsent" + old[6:], "e/new": b"unsent too", "beside": b"stays"}
    assert world.contents() == {**sent, "e/x": old}
    last.nothing_left()


@promise("S-159")
def test_a_file_that_a_start_can_not_send_stays_where_it_was(world: World, one: Client) -> None:
    """Its older bytes do not get the new name."""
    world.put("a", b"bytes")
    one.local.open("a", os.O_RDWR).write(b"B")
    rename_dies(one, "a", "b", "put")
    waiting = one.again(plan=lambda index, method: Fault(DOWN) if method == "put" else None)
    assert world.contents() == {"a": b"bytes"}
    waiting.again()
    assert world.contents() == {"a": b"Bytes"}


@promise("S-128", "S-27")
def test_bytes_that_came_after_a_rename_was_put_off_are_not_dropped_by_it(world: World, one: Client) -> None:
    """They are under its new name, and could not be sent when it was made after all."""
    world.put("a", b"bytes")
    rename_dies(one, "a", "b", "copy")
    waiting = one.again(plan=from_nth(0, DOWN))
    world.later()
    waiting.faulty.plan = no_faults
    waiting.local.open("b", os.O_WRONLY | os.O_CREAT | os.O_TRUNC).write(b"newer")
    last = waiting.again(plan=lambda index, method: Fault(DOWN) if method == "put" else None)
    assert world.contents() == {"b": b"bytes"}
    last.faulty.plan = no_faults
    assert resolve(last.fs.flush_all()) == []
    assert world.contents() == {"b": b"newer"}


@promise("S-27", "S-11")
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("target", [True, False])
def test_a_renamed_directory_keeps_its_own_attributes(world: World, one: Client, resumed: bool, target: bool) -> None:
    """Not those of an empty one that it replaces, which is younger: what may be private stays so."""
    one.local.mkdir("d", 0o700)
    world.put("d/x", b"old")
    world.later()
    if target:
        one.local.mkdir("e", 0o755)
    world.later()
    rename_dies(one, "d", "e", "copy")
    last = one.again(resumed=resumed)
    assert last.local.stat("e").mode & 0o777 == 0o700
    assert world.contents() == {"e/x": b"old"}
