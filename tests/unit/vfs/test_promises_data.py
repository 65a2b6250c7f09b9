"""What reading, writing and closing promise (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import os

import pytest

from datastore.errors import AccessDenied, ServerFault
from datastore.fuse.ops import ROOT_INO, Fh, FSError, OpenRequest, resolve
from tests.faulty import from_nth, no_faults
from tests.localfs import ME
from tests.mounted import Client, World, dies_at, failing

MIB = 1 << 20
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE = 1, 2, 8, 16
DOWN = ServerFault("the server is down")
WRITING = ("put", "copy", "create_upload", "upload_part", "upload_part_copy", "complete_upload")


PERIOD = b"".join(b"%06d\n" % number for number in range(10_007))
"""No multiple of a block or part, so that bytes of one never look like those of another."""


def pattern(size: int) -> bytes:
    """Bytes that differ from block to block."""
    return (PERIOD * (size // len(PERIOD) + 1))[:size]


def refuse_writes(client: Client) -> None:
    """From now on the store takes nothing."""
    fault = from_nth(0, DOWN)
    client.faulty.plan = lambda index, method: fault(index, method) if method in WRITING else None


# -- S-17


def test_partial_writes(world: World, one: Client) -> None:
    """S-17 random writes into a file that is in the store change those bytes and no others."""
    old = pattern(100_000)
    world.put("f", old)
    with one.local.opened("f", os.O_RDWR) as file:
        file.write(b"AAA", 10)
        file.write(b"BBB", 50_001)
        file.write(b"CCC", 99_999)
        expected = bytearray(old)
        expected[10:13], expected[50_001:50_004], expected[99_999:] = b"AAA", b"BBB", b"CCC"
        assert file.read() == expected
    assert world.body("f") == expected


def test_append(world: World, one: Client) -> None:
    """S-17 appending keeps what was there."""
    world.put("f", b"one\n")
    with one.local.opened("f", os.O_WRONLY | os.O_APPEND) as file:
        file.write(b"two\n", file.stat().size)
    assert world.body("f") == b"one\ntwo\n"


@pytest.mark.parametrize("size", [0, 1, 5000, 8192, 20_000])
@pytest.mark.parametrize("by", ["path", "descriptor"])
def test_truncate(world: World, one: Client, size: int, by: str) -> None:
    """S-17 by path and by descriptor; what is added is zeros, also where there were other bytes before."""
    old = pattern(10_000)
    world.put("f", old)
    expected = old[:size].ljust(size, b"\0")
    if by == "path":
        one.local.truncate("f", size)
        assert world.body("f") == expected
        one.local.truncate("f", 15_000)
    else:
        with one.local.opened("f", os.O_RDWR) as file:
            file.truncate(size)
            assert file.stat().size == size
            file.truncate(15_000)
            assert file.read() == expected[:15_000].ljust(15_000, b"\0")
    assert world.body("f") == expected[:15_000].ljust(15_000, b"\0")
    assert one.local.stat("f").size == 15_000


def test_sparse_files(world: World, one: Client) -> None:
    """S-17 a gap reads as zeros."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        file.write(b"end", 1_000_000)
        assert file.read(999_998, 5) == b"\0\0end"
    assert world.body("f") == bytes(1_000_000) + b"end"


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
    """S-17 allocate, keep size, punch hole, zero range."""
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


@pytest.mark.parametrize("mode", [PUNCH_HOLE, COLLAPSE_RANGE, 32, 64, KEEP_SIZE | COLLAPSE_RANGE])
def test_other_modes_of_fallocate(one: Client, mode: int) -> None:
    """S-17 EOPNOTSUPP."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        failing(errno.EOPNOTSUPP, file.fallocate, mode, 0, 10)


def test_pages_that_are_written_back_after_the_close(world: World, one: Client) -> None:
    """S-17 shared mmap: what the kernel writes back after close is sent when the last reference goes."""
    file = one.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(b"before")
    resolve(one.fs.flush(file.ino, file._fh))
    assert world.body("f") == b"before"
    file.write(b"mapped")
    resolve(one.fs.release(file.ino, file._fh))
    assert world.body("f") == b"mapped"


# -- S-18


def test_close_means_that_it_is_in_the_store(world: World, one: Client) -> None:
    """S-18 when close returned, bytes and attributes are there."""
    with one.local.opened("f", os.O_WRONLY | os.O_CREAT, 0o600) as file:
        file.write(b"bytes")
        one.local.chmod("f", 0o640)
        assert world.all_keys() == []
    assert world.body("f") == b"bytes"
    assert world.metadata("f")["mode"] == str(0o100640)


def test_fsync_means_that_it_is_in_the_store(world: World, one: Client) -> None:
    """S-18 the same for fsync, again and again."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        for content in (b"one", b"two", b"three"):
            file.write(content)
            file.fsync()
            assert world.body("f") == content
        sent = one.calls("put")
    assert one.calls("put") == sent


def test_each_of_several_closes_delivers(world: World, one: Client) -> None:
    """S-18 a file that is open twice is delivered by whoever closes."""
    first = one.local.open("f", os.O_RDWR | os.O_CREAT)
    second = one.local.open("f", os.O_RDWR)
    first.write(b"one")
    first.close()
    assert world.body("f") == b"one"
    second.write(b"two")
    second.close()
    assert world.body("f") == b"two"


# -- S-19


def test_a_failed_upload_fails_close_and_loses_nothing(world: World, one: Client) -> None:
    """S-19 the error is reported, the bytes are readable and listed, and go with the next retry."""
    refuse_writes(one)
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"precious")
    failing(errno.EIO, file.close)
    assert world.all_keys() == []
    assert one.local.read("f") == b"precious"
    assert one.local.listdir() == [b"f"]
    world.later(3600)
    assert one.local.read("f") == b"precious"
    (row,) = one.fs.uploads.unsent()
    assert (row["path"], row["bytes"], row["error"]) == ("f", 8, "the server is down")
    one.faulty.plan = no_faults
    assert one.fs.flush_all() == []
    assert world.body("f") == b"precious"
    assert one.fs.uploads.unsent() == []
    assert list((one.directory / "state" / "staging").iterdir()) == []


def test_a_failed_fsync_is_made_good_by_the_next(world: World, one: Client) -> None:
    """S-19 fsync and close send again what an earlier one could not."""
    with one.local.opened("f", os.O_WRONLY | os.O_CREAT) as file:
        file.write(b"precious")
        refuse_writes(one)
        failing(errno.EIO, file.fsync)
        failing(errno.EIO, file.fsync)
        one.faulty.plan = no_faults
    assert world.body("f") == b"precious"


def test_the_next_close_of_the_file_sends_what_an_earlier_one_could_not(world: World, one: Client) -> None:
    """S-19 whoever opens the file for writing again and closes it delivers all."""
    refuse_writes(one)
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"precious")
    failing(errno.EIO, file.close)
    one.faulty.plan = no_faults
    with one.local.opened("f", os.O_WRONLY) as file:
        file.write(b"!", 8)
    assert world.body("f") == b"precious!"


def test_unmount_sends_what_was_left(world: World, one: Client) -> None:
    """S-19 the last chance of the process."""
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f", b"precious")
    one.faulty.plan = no_faults
    one.unmount()
    assert world.body("f") == b"precious"


def test_a_failed_truncate_keeps_the_new_size(world: World, one: Client) -> None:
    """S-19 truncate by path sends at once; if it cannot, that is its error."""
    world.put("f", b"0123456789")
    refuse_writes(one)
    failing(errno.EIO, one.local.truncate, "f", 4)
    assert world.body("f") == b"0123456789"
    assert one.local.read("f") == b"0123"
    one.faulty.plan = no_faults
    assert one.fs.flush_all() == []
    assert world.body("f") == b"0123"


def test_a_large_upload_that_fails_leaves_no_unfinished_parts(world: World, one: Client) -> None:
    """S-19 a multipart upload that fails is aborted, and the bytes stay."""
    content = pattern(9 * MIB)
    fault = from_nth(0, DOWN)
    one.faulty.plan = lambda index, method: fault(index, method) if method == "complete_upload" else None
    failing(errno.EIO, one.local.write, "f", content)
    assert list(world.tool.pending_uploads("")) == []
    one.faulty.plan = no_faults
    assert one.fs.flush_all() == []
    assert world.body("f") == content


def test_a_node_whose_upload_was_retried_can_be_forgotten(world: World, one: Client) -> None:
    """S-19 nothing of a delivered file stays in memory when the kernel has forgotten it."""
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f", b"precious")
    ino = one.local.stat("f").ino
    one.fs.forget(ino, 1 << 30)
    assert ino in one.fs.core.nodes.by_ino
    one.faulty.plan = no_faults
    assert one.fs.flush_all() == []
    assert ino not in one.fs.core.nodes.by_ino


# -- S-20


def test_unsent_bytes_are_sent_by_the_next_mount(world: World, one: Client) -> None:
    """S-20 a process that dies with an open file loses no byte that was written."""
    world.put("old", pattern(10_000))
    one.local.open("new", os.O_WRONLY | os.O_CREAT, 0o640).write(b"new bytes")
    one.local.open("old", os.O_RDWR).write(b"XXX", 5000)
    again = one.again()
    expected = bytearray(pattern(10_000))
    expected[5000:5003] = b"XXX"
    assert world.body("old") == expected
    assert world.body("new") == b"new bytes"
    assert world.metadata("new")["mode"] == str(0o100640)
    assert again.fs.uploads.unsent() == []
    assert again.local.read("old") == expected


def test_unsent_sizes_are_sent_by_the_next_mount(world: World, one: Client) -> None:
    """S-20 a truncate that was not sent is not forgotten; zeros stay zeros."""
    world.put("f", pattern(10_000))
    file = one.local.open("f", os.O_RDWR)
    file.truncate(3000)
    file.truncate(9000)
    file.write(b"end", 20_000)
    one.again()
    assert world.body("f") == (pattern(3000).ljust(20_000, b"\0") + b"end")


def test_failed_bytes_are_sent_by_the_next_mount_when_the_store_is_well(world: World, one: Client) -> None:
    """S-20 also when the upload failed first, and when the next mount fails again."""
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f", b"precious")
    one.unmount()
    assert world.all_keys() == []
    one.again()
    assert world.body("f") == b"precious"


def test_nothing_is_sent_twice(world: World, one: Client) -> None:
    """S-20 what was delivered is not sent again over what others wrote since."""
    one.local.write("f", b"ours")
    world.put("f", b"theirs")
    one.again()
    assert world.body("f") == b"theirs"


def test_a_removed_file_does_not_come_back(world: World, one: Client) -> None:
    """S-20 a file that was removed while its bytes were unsent stays removed."""
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"scrap")
    one.local.unlink("f")
    file.write(b"more scrap")
    again = one.again()
    assert world.all_keys() == []
    assert again.fs.uploads.unsent() == []
    assert list((one.directory / "state" / "staging").iterdir()) == []


def test_a_restarted_server_has_the_unsent_bytes_of_its_mount(world: World, one: Client) -> None:
    """S-20 under a mount that lives on, the file is still unsent, is read, and its close delivers."""
    world.put("f", pattern(10_000))
    file = one.local.open("f", os.O_RDWR)
    file.write(b"XXX", 5000)
    again = one.again(resumed=True)
    assert world.body("f") == pattern(10_000)
    expected = bytearray(pattern(10_000))
    expected[5000:5003] = b"XXX"
    assert bytes(resolve(again.fs.read(file.ino, file._fh, 0, 10_000))) == expected
    resolve(again.fs.flush(file.ino, file._fh))
    resolve(again.fs.release(file.ino, file._fh))
    assert world.body("f") == expected


@pytest.mark.parametrize("change", ["unlink", "rename"])
def test_a_restarted_server_knows_that_the_object_exists(world: World, one: Client, change: str) -> None:
    """S-20 a changed file of the earlier process is removed or renamed with its object."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    file.truncate(0)
    file.write(b"new")
    again = one.again(resumed=True)
    if change == "unlink":
        again.local.unlink("f")
        assert world.all_keys() == []
    else:
        again.local.rename("f", "g")
        assert world.all_keys() == ["g"]
        assert world.body("g") == b"new"


# -- S-21


def test_a_change_in_the_middle_uploads_its_part(world: World, one: Client) -> None:
    """S-21 of a large object only the parts that changed are sent."""
    content = bytearray(pattern(24 * MIB))
    world.put("f", bytes(content))
    with one.local.opened("f", os.O_RDWR) as file:
        file.write(b"XXX", 12 * MIB)
    content[12 * MIB : 12 * MIB + 3] = b"XXX"
    assert world.body("f") == content
    assert one.sent_bytes() <= 8 * MIB
    assert one.calls("upload_part_copy") >= 1


def test_appending_to_a_large_object_uploads_the_end(world: World, one: Client) -> None:
    """S-21 the beginning is copied."""
    world.put("f", pattern(17 * MIB))
    with one.local.opened("f", os.O_WRONLY | os.O_APPEND) as file:
        file.write(b"end", 17 * MIB)
    assert world.body("f") == pattern(17 * MIB) + b"end"
    assert one.sent_bytes() <= 8 * MIB


def test_attributes_and_renames_upload_nothing(world: World, one: Client) -> None:
    """S-21 they are copies on the server."""
    world.put("d/f", pattern(MIB))
    one.local.chmod("d/f", 0o600)
    one.local.rename("d/f", "d/g")
    one.local.rename("d", "e")
    assert world.body("e/g") == pattern(MIB)
    assert one.sent_bytes() == 0
    assert one.calls("get") == 0


# -- S-22


def test_exclusive_creation_succeeds_for_one(world: World, one: Client, other: Client) -> None:
    """S-22 two clients that both know the name is free: the store decides."""
    one.local.listdir()
    other.local.listdir()
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    with one.local.opened("lock", flags):
        assert world.all_keys() == ["lock"]
        failing(errno.EEXIST, other.local.open, "lock", flags)
    failing(errno.EEXIST, one.local.open, "lock", flags)


def test_exclusive_creation_beside_an_unsent_file(one: Client) -> None:
    """S-22 also where this mount has the name, but the store does not yet."""
    with one.local.opened("f", os.O_CREAT | os.O_WRONLY):
        request = OpenRequest(flags=os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        with pytest.raises(FSError) as caught:
            resolve(one.fs.create(ME, ROOT_INO, b"f", 0o100644, request))
        assert caught.value.errno == errno.EEXIST


def test_a_new_file_appears_at_close(world: World, one: Client, other: Client) -> None:
    """S-22 without O_EXCL the store learns of a file when it is closed, also of an empty one."""
    file = one.local.open("f", os.O_CREAT | os.O_WRONLY)
    assert one.local.exists("f")
    assert one.local.listdir() == [b"f"]
    assert world.all_keys() == []
    assert not other.local.exists("f")
    file.close()
    assert world.body("f") == b""


# -- S-23


@pytest.mark.parametrize("size", [0, 100, 3 * MIB])
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_removed_file_keeps_its_content_while_open(world: World, one: Client, size: int, how: str) -> None:
    """S-23 who has it open goes on reading, and may write; nothing of it comes back."""
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


@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_large_removed_file_is_kept_in_the_bucket(world: World, one: Client, how: str) -> None:
    """S-23 above the limit the bytes go to a hidden key until the last close, and nothing is downloaded."""
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


def test_hidden_copies_are_removed_by_the_next_mount(world: World, one: Client) -> None:
    """S-23 when the process died before the last close."""
    world.put("f", pattern(3 * MIB))
    one.keep_small_copies_only(MIB)
    one.local.open("f")
    one.local.unlink("f")
    assert len(world.all_keys()) == 1
    again = one.again()
    assert world.all_keys() == []
    assert again.fs.core.db.intents() == []


def test_a_hidden_copy_is_forgotten_with_the_last_close(world: World, one: Client) -> None:
    """S-23 nothing stays in the journal."""
    world.put("f", pattern(3 * MIB))
    one.keep_small_copies_only(MIB)
    with one.local.opened("f"):
        one.local.unlink("f")
    assert one.fs.core.db.intents() == []


def test_writing_to_a_large_removed_file(world: World, one: Client) -> None:
    """S-23 its bytes still come from the hidden copy."""
    content = bytearray(pattern(3 * MIB))
    world.put("f", bytes(content))
    one.keep_small_copies_only(MIB)
    with one.local.opened("f", os.O_RDWR) as file:
        one.local.unlink("f")
        file.write(b"XXX", MIB + 5)
        content[MIB + 5 : MIB + 8] = b"XXX"
        assert file.read() == content
    assert world.all_keys() == []


def test_an_unsent_file_that_is_removed_is_never_sent(world: World, one: Client) -> None:
    """S-23 a temporary file costs no upload."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        file.write(b"scrap")
        one.local.unlink("f")
        assert file.read() == b"scrap"
    assert one.calls(*WRITING) == 0
    assert not one.local.exists("f")


def test_a_name_that_is_made_again_while_the_old_file_is_open(world: World, one: Client) -> None:
    """S-23 the two are different files."""
    world.put("f", b"old")
    with one.local.opened("f") as file:
        one.local.unlink("f")
        one.local.write("f", b"new")
        assert one.local.stat("f").ino != file.ino
        assert file.read() == b"old"
        assert one.local.read("f") == b"new"
    assert world.body("f") == b"new"


def test_a_denied_upload_is_the_persons_to_solve(world: World, one: Client) -> None:
    """S-19 an error that is not passing is EACCES, and the bytes stay as well."""
    one.faulty.plan = lambda index, method: from_nth(0, AccessDenied("no"))(index, method) if method == "put" else None
    failing(errno.EACCES, one.local.write, "f", b"precious")
    assert one.local.read("f") == b"precious"


def test_death_within_an_upload(world: World, one: Client) -> None:
    """S-20 at whatever call the process dies, the next mount delivers the whole."""
    content = pattern(9 * MIB)
    for number in range(2):
        client = world.client()
        client.local.listdir()
        client.faulty.plan = dies_at(len(client.faulty.calls) + number)
        with pytest.raises(BaseException, match="^$"):
            client.local.write(f"f{number}", content)
        client.again()
        assert world.body(f"f{number}") == content


def test_an_unknown_handle_is_answered_by_its_inode(world: World, one: Client) -> None:
    """S-20 a handle of an earlier process reads and writes its file."""
    world.put("f", b"abc")
    ino = one.local.stat("f").ino
    assert bytes(resolve(one.fs.read(ino, Fh(999), 0, 10))) == b"abc"
    resolve(one.fs.write(ino, Fh(999), 3, memoryview(b"def"), False))
    resolve(one.fs.flush(ino, Fh(999)))
    assert world.body("f") == b"abcdef"
