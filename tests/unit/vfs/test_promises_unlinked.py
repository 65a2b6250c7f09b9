"""What holds for files that are removed while they are open (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import os

import pytest

from tests.mounted import WRITING, Client, World, pattern
from tests.promises import promise

MIB = 1 << 20


@promise("S-23")
@pytest.mark.parametrize("size", [0, 100, 3 * MIB])
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_removed_file_keeps_its_content_while_open(world: World, one: Client, size: int, how: str) -> None:
    """Who has it open goes on reading, and may write; nothing of it comes back."""
    content = pattern(size)
    world.put("f", content)
    world.put("g", b"replacement")
    with one.local.opened("f", os.O_RDWR) as file:
        one.local.unlink("f") if how == "unlink" else one.local.rename("g", "f")
        assert file.stat().nlink == 0
        assert file.read() == content
        file.write(b"!", size)
        assert file.read() == content + b"!"
    expected = {"g": b"replacement"} if how == "unlink" else {"f": b"replacement"}
    assert {key: world.body(key) for key in world.all_keys()} == expected


@promise("S-23")
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_large_removed_file_is_kept_in_the_bucket(world: World, one: Client, how: str) -> None:
    """Above the limit the bytes go to a hidden key until the last close, and nothing is downloaded."""
    content = pattern(3 * MIB)
    world.put("f", content)
    world.put("g", b"replacement")
    one.keep_small_copies_only(MIB)
    with one.local.opened("f") as file:
        one.local.unlink("f") if how == "unlink" else one.local.rename("g", "f")
        assert one.calls("get") == 0
        hidden = [key for key in world.all_keys() if key.startswith(".datastore.unlinked/")]
        assert len(hidden) == 1
        assert file.read() == content
        world.later()
        assert one.local.listdir() == ([b"g"] if how == "unlink" else [b"f"])
    assert world.all_keys() == (["g"] if how == "unlink" else ["f"])


@promise("S-23")
def test_hidden_copies_are_removed_by_the_next_mount(world: World, one: Client) -> None:
    """When the process died before the last close."""
    world.put("f", pattern(3 * MIB))
    one.keep_small_copies_only(MIB)
    one.local.open("f")
    one.local.unlink("f")
    assert len(world.all_keys()) == 1
    again = one.again()
    assert world.all_keys() == []
    assert again.fs.core.db.intents() == []


@promise("S-23")
def test_a_hidden_copy_is_forgotten_with_the_last_close(world: World, one: Client) -> None:
    """Nothing stays in the journal."""
    world.put("f", pattern(3 * MIB))
    one.keep_small_copies_only(MIB)
    with one.local.opened("f"):
        one.local.unlink("f")
    assert one.fs.core.db.intents() == []


@promise("S-23")
def test_writing_to_a_large_removed_file(world: World, one: Client) -> None:
    """Its bytes still come from the hidden copy."""
    content = bytearray(pattern(3 * MIB))
    world.put("f", bytes(content))
    one.keep_small_copies_only(MIB)
    with one.local.opened("f", os.O_RDWR) as file:
        one.local.unlink("f")
        file.write(b"XXX", MIB + 5)
        content[MIB + 5 : MIB + 8] = b"XXX"
        assert file.read() == content
    assert world.all_keys() == []


@promise("S-23")
def test_an_unsent_file_that_is_removed_is_never_sent(world: World, one: Client) -> None:
    """A temporary file costs no upload."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        file.write(b"scrap")
        one.local.unlink("f")
        assert file.read() == b"scrap"
    assert one.calls(*WRITING) == 0
    assert not one.local.exists("f")


@promise("S-23")
def test_a_name_that_is_made_again_while_the_old_file_is_open(world: World, one: Client) -> None:
    """The two are different files."""
    world.put("f", b"old")
    with one.local.opened("f") as file:
        one.local.unlink("f")
        one.local.write("f", b"new")
        assert one.local.stat("f").ino != file.ino
        assert file.read() == b"old"
        assert one.local.read("f") == b"new"
    assert world.body("f") == b"new"
