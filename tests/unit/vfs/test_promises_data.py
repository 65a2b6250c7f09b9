"""What reading, writing, closing and removing open files promise (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import os
import stat
from typing import Literal

import pytest

from datastore.errors import InvalidRequest, PreconditionFailed, StoreError, Unsupported
from datastore.fuse.data.multipart import OBJECT_MAX
from datastore.fuse.ops import ROOT_INO, OpenRequest
from tests.driving import resolve
from tests.faulty import Fault, no_faults
from tests.localfs import ME
from tests.mounted import WRITING, Client, World, failing, pattern
from tests.promises import promise

MIB = 1 << 20
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE = 1, 2, 8, 16


@promise("S-143")
def test_what_no_object_can_hold_is_refused_before_anything_is_sent(world: World, one: Client) -> None:
    """EFBIG beyond 5 TiB: the holes of such a file would all be sent, and refused at the very end."""
    world.put("f", b"old")
    with one.local.opened("f", os.O_RDWR) as file:
        failing(errno.EFBIG, file.truncate, OBJECT_MAX + 1)
        failing(errno.EFBIG, file.write, b"ab", OBJECT_MAX - 1)
        failing(errno.EFBIG, file.fallocate, 0, OBJECT_MAX, 1)
        assert file.stat().size == 3
    failing(errno.EFBIG, one.local.truncate, "f", OBJECT_MAX + 1)
    assert world.body("f") == b"old"


@promise("S-17")
@pytest.mark.parametrize(
    ("mode", "offset", "length", "size"),
    [
        (0, 0, 20_000, 20_000),
        (0, 100, 200, 10_000),
        (KEEP_SIZE, 0, 20_000, 10_000),
        (KEEP_SIZE | PUNCH_HOLE, 100, 5000, 10_000),
        (KEEP_SIZE | PUNCH_HOLE, 9000, 5000, 10_000),
        (ZERO_RANGE, 9000, 5000, 14_000),
        (ZERO_RANGE | KEEP_SIZE, 9000, 5000, 10_000),
        (ZERO_RANGE, 12_000, 100, 12_100),
    ],
)
def test_fallocate(world: World, one: Client, mode: int, offset: int, length: int, size: int) -> None:
    """Allocate, keep size, punch hole, zero range."""
    expected = bytearray(pattern(10_000))
    world.put("f", bytes(expected))
    if mode & (PUNCH_HOLE | ZERO_RANGE):
        stop = min(offset + length, len(expected))
        expected[offset:stop] = bytes(max(0, stop - offset))
    with one.local.opened("f", os.O_RDWR) as file:
        file.fallocate(mode, offset, length)
        assert file.stat().size == size
        assert file.read() == expected.ljust(size, b"\0")
    assert world.body("f") == expected.ljust(size, b"\0")
    assert one.local.stat("f").size == size


@promise("S-17", "S-18")
@pytest.mark.parametrize("flags", [None, os.O_RDONLY, os.O_RDWR])
@pytest.mark.parametrize("size", [0, 3000, 20_000])
@pytest.mark.parametrize("attributes", ["full", "listing"])
def test_truncate_by_path(world: World, size: int, flags: int | None, attributes: Literal["full", "listing"]) -> None:
    """It is in the store when the call returns, unless somebody has the file open for writing: then at that close."""
    one, mode = world.client(attributes=attributes), str(stat.S_IFREG | 0o604)
    content, wanted = pattern(10_000), pattern(10_000)[:size].ljust(size, b"\0")
    world.put("f", content, mode=mode)
    file = one.local.open("f", flags) if flags is not None else None
    one.local.truncate("f", size)
    assert one.calls("copy") == 0
    assert one.local.stat("f").size == size
    assert world.body("f") == (content if flags == os.O_RDWR else wanted)
    if file is not None:
        assert file.read() == wanted
        file.close()
    one.nothing_left()
    assert world.body("f") == one.local.read("f") == wanted
    assert world.metadata("f")["mode"] == mode


@promise("S-17")
@pytest.mark.parametrize("mode", [PUNCH_HOLE, COLLAPSE_RANGE, 32, 64, KEEP_SIZE | COLLAPSE_RANGE])
def test_other_modes_of_fallocate_are_not_supported(one: Client, mode: int) -> None:
    """EOPNOTSUPP."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        failing(errno.EOPNOTSUPP, file.fallocate, mode, 0, 10)


@promise("S-18")
def test_close_and_fsync_mean_that_it_is_in_the_store(world: World, one: Client) -> None:
    """When they returned, bytes and attributes are there; after the last fsync the close sends nothing."""
    with one.local.opened("f", os.O_WRONLY | os.O_CREAT, 0o600) as file:
        file.write(b"bytes")
        one.local.chmod("f", 0o640)
        assert world.all_keys() == []
    assert world.body("f") == b"bytes"
    assert world.metadata("f")["mode"] == str(0o100640)
    with one.local.opened("g", os.O_RDWR | os.O_CREAT) as file:
        for content in (b"one", b"two", b"three"):
            file.write(content)
            file.fsync()
            assert world.body("g") == content
        sent = one.calls("put")
    assert one.calls("put") == sent


@promise("S-21")
def test_a_change_in_the_middle_uploads_its_part(world: World, one: Client) -> None:
    """Of a large object only the parts that changed are sent."""
    content = bytearray(pattern(24 * MIB))
    world.put("f", bytes(content))
    with one.local.opened("f", os.O_RDWR) as file:
        file.write(b"XXX", 12 * MIB)
    content[12 * MIB : 12 * MIB + 3] = b"XXX"
    assert world.body("f") == content
    assert one.sent_bytes() <= 8 * MIB
    assert one.calls("upload_part_copy") >= 1


@promise("S-21", "S-162")
@pytest.mark.parametrize("error", [Unsupported("no such operation"), InvalidRequest("refused")])
def test_a_store_that_copies_no_parts_gets_the_whole_file(world: World, one: Client, error: StoreError) -> None:
    """Its conditions stay: what another client wrote meanwhile is not replaced."""
    content = bytearray(pattern(24 * MIB))
    world.put("f", bytes(content))
    one.faulty.plan = lambda _, method: Fault(error) if method == "upload_part_copy" else None
    with one.local.opened("f", os.O_RDWR) as file:
        file.write(b"XXX", 12 * MIB)
    content[12 * MIB : 12 * MIB + 3] = b"XXX"
    assert world.body("f") == one.local.read("f") == content
    one.nothing_left()
    file = one.local.open("f", os.O_RDWR)
    file.write(b"ours", 0)
    world.put("f", b"theirs")
    failing(errno.ESTALE, file.close)
    assert world.body("f") == b"theirs"


@promise("S-21")
def test_attributes_and_renames_upload_nothing(world: World, one: Client) -> None:
    """They are copies on the server."""
    world.put("d/f", pattern(MIB))
    one.local.chmod("d/f", 0o600)
    one.local.rename("d/f", "d/g")
    one.local.rename("d", "e")
    assert world.body("e/g") == pattern(MIB)
    assert one.sent_bytes() == 0
    assert one.calls("get") == 0


@promise("S-22")
def test_exclusive_creation_succeeds_for_one(world: World, one: Client, other: Client) -> None:
    """Two clients that both know the name is free: the store decides, also where it has not the name that one has."""
    one.local.listdir()
    other.local.listdir()
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    with one.local.opened("lock", flags):
        assert world.all_keys() == ["lock"]
        failing(errno.EEXIST, other.local.open, "lock", flags)
    failing(errno.EEXIST, one.local.open, "lock", flags)
    with one.local.opened("f", os.O_CREAT | os.O_WRONLY):
        create = one.fs.create(ME, ROOT_INO, b"f", 0o100644, OpenRequest(flags=flags))
        failing(errno.EEXIST, resolve, create)


@promise("S-22")
def test_a_new_file_appears_at_close(world: World, one: Client, other: Client) -> None:
    """Without O_EXCL the store learns of a file when it is closed, also of an empty one."""
    file = one.local.open("f", os.O_CREAT | os.O_WRONLY)
    assert one.local.exists("f")
    assert one.local.listdir() == [b"f"]
    assert world.all_keys() == []
    assert not other.local.exists("f")
    file.close()
    assert world.body("f") == b""


@promise("S-29")
def test_a_file_is_read_while_it_is_uploaded(world: World, one: Client) -> None:
    """The upload holds the node's lock; bytes that are in the staging file need not wait for it."""
    with one.local.opened("file", os.O_CREAT | os.O_RDWR) as file:
        file.write(b"written")
        node = one.fs.core.nodes.by_ino[file.ino]

        async def read_beside_an_upload() -> bytes:
            async with node.lock:
                return bytes(await one.fs.loop.spawn(one.fs.read(file.ino, file._fh, 0, 100)))

        assert resolve(read_beside_an_upload()) == b"written"


def remove(client: Client, how: str) -> None:
    """`f`, or its content."""
    client.local.unlink("f") if how == "unlink" else client.local.rename("g", "f")


@promise("S-23")
@pytest.mark.parametrize("size", [0, 100, 3 * MIB])
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_removed_file_keeps_its_content_while_open(world: World, one: Client, size: int, how: str) -> None:
    """Who has it open goes on reading, and may write; nothing of it comes back."""
    content = pattern(size)
    world.put("f", content)
    world.put("g", b"replacement")
    with one.local.opened("f", os.O_RDWR) as file:
        remove(one, how)
        assert file.stat().nlink == 0
        assert file.read() == content
        file.write(b"!", size)
        assert file.read() == content + b"!"
    assert world.contents() == {"g" if how == "unlink" else "f": b"replacement"}


@promise("S-23")
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_large_removed_file_is_kept_in_the_bucket(world: World, one: Client, how: str) -> None:
    """Above the limit the bytes go to a hidden key until the last close, and nothing is downloaded before a read."""
    content = bytearray(pattern(3 * MIB))
    left = "g" if how == "unlink" else "f"
    world.put("f", bytes(content))
    world.put("g", b"replacement")
    one.keep_small_copies_only(MIB)
    with one.local.opened("f", os.O_RDWR) as file:
        remove(one, how)
        assert one.calls("get") == 0
        assert len([key for key in world.all_keys() if key.startswith(".datastore.unlinked/")]) == 1
        assert file.read() == content
        world.later()
        assert one.local.listdir() == [left.encode()]
        file.write(b"XXX", MIB + 5)
        content[MIB + 5 : MIB + 8] = b"XXX"
        assert file.read() == content
    assert world.contents() == {left: b"replacement"}
    assert one.fs.core.db.intents() == []


@promise("S-23")
@pytest.mark.parametrize(("kept_bytes", "method"), [(MIB, "get"), (10, "copy")])
def test_a_removal_fails_if_open_bytes_can_not_be_kept(world: World, one: Client, kept_bytes: int, method: str) -> None:
    """Its removal fails if its bytes are not to be had, although the store still has the version."""
    world.put("f", b"x" * 1000)
    one.keep_small_copies_only(kept_bytes)
    with one.local.opened("f") as file:
        refused = Fault(PreconditionFailed("it has another version"))
        one.faulty.plan = lambda _, called: refused if called == method else None
        failing(errno.ESTALE, one.local.unlink, "f")
        one.faulty.plan = no_faults
        assert file.read() == one.local.read("f") == b"x" * 1000
    assert world.contents() == {"f": b"x" * 1000}
    one.nothing_left()


@promise("S-23", "S-30")
def test_an_open_file_that_another_client_removed_can_be_removed(world: World, one: Client) -> None:
    """Although nobody can keep its bytes any more."""
    world.put("f", b"x")
    with one.local.opened("f"):
        world.tool.delete("f")
        one.local.unlink("f")
        assert not one.local.exists("f")


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
def test_a_new_file_of_the_name_of_an_open_removed_one_is_another_file(world: World, one: Client) -> None:
    """The two are different files."""
    world.put("f", b"old")
    with one.local.opened("f") as file:
        one.local.unlink("f")
        one.local.write("f", b"new")
        assert one.local.stat("f").ino != file.ino
        assert file.read() == b"old"
        assert one.local.read("f") == b"new"
    assert world.body("f") == b"new"
