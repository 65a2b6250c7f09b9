"""What holds for open files that another client replaces (docs/SEMANTICS.md): two mounts of one bucket."""

from __future__ import annotations

import errno
import os

import pytest

from datastore.errors import Unsupported
from datastore.fuse.ops import ROOT_INO, Caller, FSError, OpenRequest
from datastore.fuse.store.base import Body, WriteOptions, WriteResult
from tests.driving import resolve
from tests.mounted import Client, World, failing
from tests.promises import promise

BOTH_LISTINGS = True

ME = Caller(1000, 1000, 1)
SIZE = 9 << 20
"""More than is fetched in one piece, so that a client holds a part."""


# -- S-30


@promise("S-30")
def test_an_open_file_stays_on_its_version(world: World, one: Client) -> None:
    """Bytes of two versions never meet in one read: what is not held is ESTALE, a new open reads the new one."""
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


@promise("S-30")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_read_that_finds_a_replacement_shows_it_to_the_next_open(world: World, one: Client, flags: int) -> None:
    """Also while the old file is open, and within the time for which its name is believed."""
    world.put("f", b"o" * SIZE)
    one.local.listdir()
    before = one.local.open("f", flags)
    world.put("f", b"of another size")
    file = one.local.open("f")
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    assert one.local.read("f") == b"of another size"
    file.close()
    before.close()


@promise("S-30")
def test_a_file_that_another_client_removed(world: World, one: Client) -> None:
    """The handle reads what is held, the rest is ESTALE, and the name is gone."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f")
    assert file.read(0, 4096) == b"o" * 4096
    world.tool.delete("f")
    world.later()
    assert file.read(0, 4096) == b"o" * 4096
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    assert not one.local.exists("f")
    file.close()


# -- S-31


@promise("S-31")
@pytest.mark.parametrize("size", [100, 200_000])
def test_an_object_that_grew_is_followed(world: World, one: Client, size: int) -> None:
    """As tail -f and TensorBoard need: the handle reads what was appended."""
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


@promise("S-31")
def test_an_object_that_grew_but_not_at_its_end(world: World, one: Client) -> None:
    """Another object that is merely longer is another version."""
    world.put("log", b"a" * 100)
    with one.local.opened("log") as file:
        assert file.read() == b"a" * 100
        world.put("log", b"b" * 200)
        world.later()
        assert one.local.read("log") == b"b" * 200
        assert file.read(0, 100) == b"a" * 100


# -- S-32


@promise("S-32")
def test_the_last_close_wins_whole(world: World, one: Client, other: Client) -> None:
    """Two who write one file anew: never a mixture."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for _ in range(2):  # it is not there, and it is
        first, second = one.local.open("f", flags), other.local.open("f", flags)
        first.write(b"1" * 50, 0)
        second.write(b"2" * 70, 0)
        first.close()
        assert world.body("f") == b"1" * 50
        second.close()
        assert world.body("f") == b"2" * 70
    world.later()
    assert one.local.read("f") == other.local.read("f") == b"2" * 70


@promise("S-162", "S-32")
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
@pytest.mark.parametrize("new", [False, True])
def test_who_changes_a_part_never_replaces_what_another_closed_meanwhile(
    world: World, one: Client, other: Client, flags: int, new: bool
) -> None:
    """Never a mixture, and no bytes of either are lost: the second close is ESTALE, its bytes are kept."""
    flags |= os.O_CREAT if new else 0
    if not new:
        world.put("f", b"0" * 100)
    first, second = one.local.open("f", flags), other.local.open("f", flags)
    first.write(b"1" * 50, 0)
    second.write(b"2" * 50, 50)
    first.close()
    won = world.body("f")
    assert won.startswith(b"1" * 50)
    failing(errno.ESTALE, second.close)
    assert world.body("f") == won
    world.later()
    assert one.local.read("f") == other.local.read("f") == won
    (row,) = other.fs.uploads.unsent()
    assert (row["path"], row["stuck"], row["bytes"]) == ("f", True, 100)
    with other.local.opened("f", os.O_WRONLY | os.O_APPEND) as again:
        again.write(b"3", len(won))
    assert world.body("f") == won + b"3"


@promise("S-161", "S-162")
def test_what_this_mount_made_a_moment_ago_is_not_asked_for(world: World, one: Client) -> None:
    """Nothing is asked for at the open; what another client closed is not replaced all the same."""
    one.local.write("f", b"ours")
    asked = one.calls("head", "list_page")
    with one.local.opened("f", os.O_WRONLY | os.O_APPEND) as file:
        file.write(b", ours", 4)
    assert world.body("f") == b"ours, ours"
    world.put("f", b"theirs")
    file = one.local.open("f", os.O_WRONLY | os.O_APPEND)
    assert one.calls("head", "list_page") == asked
    file.write(b", ours", 10)
    failing(errno.ESTALE, file.close)
    assert world.body("f") == b"theirs"
    assert [row["path"] for row in one.fs.uploads.unsent()] == ["f"]


@promise("S-161")
def test_nothing_is_asked_for_while_there_are_unsent_changes(world: World, one: Client) -> None:
    """However old they are: who opens the file to write goes on from them."""
    first = one.local.open("f", os.O_RDWR | os.O_CREAT)
    first.write(b"ours")
    world.later()
    asked = one.calls("head", "list_page")
    request, node = OpenRequest(flags=os.O_WRONLY | os.O_APPEND), first.ino
    resolve(one.fs.release(node, resolve(one.fs.open(ME, node, request)).fh))
    assert one.calls("head", "list_page") == asked
    first.close()
    assert world.body("f") == b"ours"


@promise("S-161")
def test_a_create_of_a_name_that_another_client_has_made(world: World, one: Client) -> None:
    """The kernel believes that nothing is there: what is there is opened, and only O_TRUNC empties it."""
    one.local.listdir()
    for name, flag, size in (("appended", os.O_APPEND, 6), ("emptied", os.O_TRUNC, 0)):
        world.put(name, b"theirs")
        request = OpenRequest(flags=os.O_WRONLY | os.O_CREAT | flag)
        entry, reply = resolve(one.fs.create(ME, ROOT_INO, name.encode(), 0o100644, request))
        assert entry.attr is not None
        assert entry.attr.size == size
        resolve(one.fs.release(entry.attr.ino, reply.fh))
    world.put("link.rclonelink", b"target")
    with pytest.raises(FSError) as caught:
        resolve(one.fs.create(ME, ROOT_INO, b"link", 0o100644, OpenRequest(flags=os.O_WRONLY | os.O_CREAT)))
    assert caught.value.errno == errno.ESTALE
    assert world.body("appended") == b"theirs"


@promise("S-162")
def test_a_touch_gives_way_to_what_another_client_closed_meanwhile(world: World, one: Client) -> None:
    """Nothing was written: the close succeeds, and the file is the other one's."""
    touched = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    world.put("f", b"theirs")
    touched.close()
    assert world.body("f") == b"theirs"
    assert one.local.read("f") == b"theirs"
    assert one.fs.uploads.unsent() == []
    kept = one.local.open("g", os.O_WRONLY | os.O_CREAT)
    world.put("g", b"theirs")
    kept.fsync()
    kept.write(b", ours", 6)
    kept.close()
    assert world.body("g") == b"theirs, ours"


@promise("S-162")
def test_a_store_without_conditions(world: World, one: Client) -> None:
    """A server that refuses If-Match and If-None-Match gets the upload without, and is asked so once."""
    refused: list[str] = []

    put = one.faulty.put

    async def refuse(key: str, body: Body, options: WriteOptions) -> WriteResult:
        if options.if_none_match or options.if_match is not None:
            refused.append(key)
            raise Unsupported("the server does not know this operation")
        return await put(key, body, options)

    one.faulty.put = refuse  # type: ignore[method-assign]
    for name in ("a", "b"):
        with one.local.opened(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(b"ours")
        assert world.body(name) == b"ours"
    assert refused == ["a"]


@promise("S-32")
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_writer_of_the_whole_wins_over_what_another_wrote_meanwhile(
    world: World, one: Client, noticed: bool, begun: str
) -> None:
    """The one that closes last wins, also if it saw meanwhile that the object was replaced."""
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


@promise("S-32")
def test_a_writer_whose_file_was_removed_by_another_client(world: World, one: Client) -> None:
    """Its close makes the file again."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    file.write(b"new", 0)
    world.tool.delete("f")
    world.later()
    assert one.local.listdir() == [b"f"]
    file.close()
    assert world.body("f") == b"new"


# -- S-33


@promise("S-33")
def test_an_unchanged_part_that_cannot_be_had_any_more(world: World, one: Client) -> None:
    """Close is ESTALE; what was written stays in staging and is listed; the name shows theirs."""
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
    assert one.local.read("f") == b"n" * SIZE
    (kept,) = (one.directory / "state" / "staging").iterdir()
    assert kept.read_bytes()[:4] == b"mine"


@promise("S-33")
def test_a_noticed_replacement_does_not_swallow_what_is_written_later(world: World, one: Client) -> None:
    """A file that is open for writing, and known to be replaced: a close of unsent bytes never just returns 0."""
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
