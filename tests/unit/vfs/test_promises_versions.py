"""What holds for open files that another client replaces (docs/SEMANTICS.md): two mounts of one bucket."""

from __future__ import annotations

import errno
import os

import pytest

from tests.mounted import Client, World, failing, fails

BOTH_LISTINGS = True

SIZE = 9 << 20
"""More than is fetched in one piece, so that a client holds a part."""


# -- S-30


def test_an_open_file_stays_on_its_version(world: World, one: Client) -> None:
    """S-30 bytes of two versions never meet in one read: what is not held is ESTALE, a new open reads the new one."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f")
    assert file.read(0, 4096) == b"o" * 4096
    world.put("f", b"n" * SIZE)
    world.later()
    assert file.read(0, 4096) == b"o" * 4096
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    assert file.read(0, 4096) == b"o" * 4096
    assert one.local.read("f") == b"n" * SIZE
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    file.close()


def test_a_file_that_another_client_removed(world: World, one: Client) -> None:
    """S-30 the handle reads what is held, the rest is ESTALE, and the name is gone."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f")
    assert file.read(0, 4096) == b"o" * 4096
    world.tool.delete("f")
    world.later()
    assert file.read(0, 4096) == b"o" * 4096
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    assert not one.local.exists("f")
    file.close()


def test_a_replacement_that_is_noticed_by_a_listing(world: World, one: Client) -> None:
    """S-30 also when the change is seen first by a listing, the handle stays and the name is the new file."""
    world.put("f", b"old")
    file = one.local.open("f")
    assert file.read() == b"old"
    world.put("f", b"new and longer, not appended")
    world.later()
    one.local.listdir()
    assert one.local.read("f") == b"new and longer, not appended"
    assert file.read() == b"old"
    file.close()


# -- S-31


@pytest.mark.parametrize("size", [100, 200_000])
def test_an_object_that_grew_is_followed(world: World, one: Client, size: int) -> None:
    """S-31 as tail -f and TensorBoard need: the handle reads what was appended."""
    log = os.urandom(size)
    world.put("log", log)
    with one.local.opened("log") as file:
        assert file.read() == log
        for line in (b"second line\n", b"third line\n"):
            log += line
            world.put("log", log)
            world.later()
            assert one.local.stat("log").size == len(log)
            assert file.stat().size == len(log)
            assert file.read() == log
        assert one.local.stat("log").ino == file.ino


def test_an_object_that_grew_but_not_at_its_end(world: World, one: Client) -> None:
    """S-31 another object that is merely longer is another version."""
    world.put("log", b"a" * 100)
    with one.local.opened("log") as file:
        assert file.read() == b"a" * 100
        world.put("log", b"b" * 200)
        world.later()
        assert one.local.read("log") == b"b" * 200
        assert file.read(0, 100) == b"a" * 100


# -- S-32


def test_the_last_close_wins_whole(world: World, one: Client, other: Client) -> None:
    """S-32 two writers of one file: never a mixture."""
    world.put("f", b"0" * 100)
    first, second = one.local.open("f", os.O_RDWR), other.local.open("f", os.O_RDWR)
    first.write(b"1" * 50, 0)
    second.write(b"2" * 50, 50)
    first.close()
    assert world.body("f") == b"1" * 50 + b"0" * 50
    second.close()
    assert world.body("f") == b"0" * 50 + b"2" * 50
    world.later()
    assert one.local.read("f") == other.local.read("f") == b"0" * 50 + b"2" * 50


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_writer_of_the_whole_wins_over_what_another_wrote_meanwhile(
    world: World, one: Client, noticed: bool, begun: str
) -> None:
    """S-32 the one that closes last wins, also if it saw meanwhile that the object was replaced."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    file.truncate(0)
    file.write(b"mine")
    if begun == "after":
        file.fsync()
    world.later()
    world.put("f", b"theirs, which is longer")
    world.later()
    if noticed:
        one.local.listdir()
        one.local.stat("f")
    file.write(b"mine, all of it")
    file.close()
    assert world.body("f") == b"mine, all of it"
    world.later()
    assert one.local.read("f") == b"mine, all of it"
    assert one.fs.uploads.unsent() == []


def test_a_writer_that_has_written_nothing_yet(world: World, one: Client) -> None:
    """S-32 a file that was replaced between open and the first write is written whole, or the writer is told."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    world.put("f", b"theirs, which is longer")
    world.later()
    one.local.listdir()

    def write_and_close() -> None:
        file.write(b"mine", 0)
        file.close()

    told = fails(errno.ESTALE, write_and_close)
    assert world.body("f") == (b"theirs, which is longer" if told else b"mine")


def test_a_writer_whose_file_was_removed_by_another_client(world: World, one: Client) -> None:
    """S-32 its close makes the file again."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    file.write(b"new", 0)
    world.tool.delete("f")
    world.later()
    assert one.local.listdir() == [b"f"]
    file.close()
    assert world.body("f") == b"new"


def test_a_writer_whose_directory_was_removed_by_another_client(world: World, one: Client) -> None:
    """S-32 the same for its directory."""
    one.local.mkdir("d")
    file = one.local.open("d/f", os.O_WRONLY | os.O_CREAT)
    file.write(b"new", 0)
    world.tool.delete("d/")
    world.later()
    one.local.listdir()
    file.close()
    assert world.body("d/f") == b"new"
    world.later()
    assert one.local.read("d/f") == b"new"


# -- S-33


def test_an_unchanged_part_that_cannot_be_had_any_more(world: World, one: Client) -> None:
    """S-33 close is ESTALE; what was written stays in staging, is read and is listed; theirs is not harmed."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f", os.O_RDWR)
    file.write(b"mine", 0)
    world.put("f", b"n" * SIZE)
    world.later()
    failing(errno.ESTALE, file.close)
    assert world.body("f") == b"n" * SIZE
    (row,) = one.fs.uploads.unsent()
    assert row["path"] == "f"
    assert "another client" in str(row["error"])
    reader = one.local.open("f")
    assert reader.read(0, 4) == b"mine"
    assert len(list((one.directory / "state" / "staging").iterdir())) == 1


def test_a_noticed_replacement_does_not_swallow_what_is_written_later(world: World, one: Client) -> None:
    """S-33 a file that is open for writing, and known to be replaced: a close of unsent bytes never just returns 0."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f", os.O_RDWR)
    world.put("f", b"n" * SIZE)
    world.later()
    one.local.listdir()

    def write_and_close() -> None:
        file.write(b"mine", 0)
        file.close()

    failing(errno.ESTALE, write_and_close)
    assert world.body("f") == b"n" * SIZE


def test_a_truncated_part_need_not_be_had(world: World, one: Client) -> None:
    """S-33 only what is still part of the file counts."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f", os.O_RDWR)
    file.truncate(0)
    file.write(b"mine", 0)
    world.put("f", b"n" * SIZE)
    file.close()
    assert world.body("f") == b"mine"
