"""What holds when an upload fails or the process dies (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import os

import pytest

from datastore.errors import AccessDenied
from datastore.fuse.ops import Fh, Ino
from tests.clock import EPOCH_NS
from tests.driving import resolve
from tests.faulty import from_nth, no_faults
from tests.mounted import Client, World, failing, pattern, refuse_writes
from tests.promises import promise


def contents(client: Client, ino: Ino, fh: Fh) -> bytes:
    """What a read through a handle gives."""
    return bytes(resolve(client.fs.read(ino, fh, 0, 1 << 20)))


# -- S-19


@promise("S-19")
def test_a_failed_upload_fails_close_and_loses_nothing(world: World, one: Client) -> None:
    """The error is reported, the bytes are readable and listed, and go with the next retry."""
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
    assert row["since"] == EPOCH_NS / 1e9
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert world.body("f") == b"precious"
    assert one.fs.uploads.unsent() == []
    assert list((one.directory / "state" / "staging").iterdir()) == []


@promise("S-19")
def test_the_next_close_of_the_file_sends_what_an_earlier_one_could_not(world: World, one: Client) -> None:
    """Whoever opens the file for writing again and closes it delivers all."""
    refuse_writes(one)
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"precious")
    failing(errno.EIO, file.close)
    one.faulty.plan = no_faults
    with one.local.opened("f", os.O_WRONLY) as file:
        file.write(b"!", 8)
    assert world.body("f") == b"precious!"


@promise("S-19")
def test_unmount_sends_what_was_left(world: World, one: Client) -> None:
    """The last chance of the process."""
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f", b"precious")
    one.faulty.plan = no_faults
    one.unmount()
    assert world.body("f") == b"precious"


@promise("S-19")
def test_a_failed_truncate_keeps_the_new_size(world: World, one: Client) -> None:
    """Truncate by path sends at once; if it cannot, that is its error."""
    world.put("f", b"0123456789")
    refuse_writes(one)
    failing(errno.EIO, one.local.truncate, "f", 4)
    assert world.body("f") == b"0123456789"
    assert one.local.read("f") == b"0123"
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert world.body("f") == b"0123"


@promise("S-19")
def test_a_node_whose_upload_was_retried_can_be_forgotten(world: World, one: Client) -> None:
    """Nothing of a delivered file stays in memory when the kernel has forgotten it."""
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f", b"precious")
    ino = one.local.stat("f").ino
    one.fs.forget(ino, 1 << 30)
    assert ino in one.fs.core.nodes.by_ino
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert ino not in one.fs.core.nodes.by_ino


@promise("S-19")
def test_a_denied_upload_is_the_persons_to_solve(world: World, one: Client) -> None:
    """An error that is not passing is EACCES, and the bytes stay as well."""
    one.faulty.plan = lambda index, method: from_nth(0, AccessDenied("no"))(index, method) if method == "put" else None
    failing(errno.EACCES, one.local.write, "f", b"precious")
    assert one.local.read("f") == b"precious"


# -- S-20


@promise("S-20")
def test_unsent_bytes_are_sent_by_the_next_mount(world: World, one: Client) -> None:
    """A process that dies with an open file loses no byte that was written."""
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


@promise("S-20")
def test_nothing_is_sent_twice(world: World, one: Client) -> None:
    """What was delivered is not sent again over what others wrote since."""
    one.local.write("f", b"ours")
    world.put("f", b"theirs")
    one.again()
    assert world.body("f") == b"theirs"


@promise("S-20")
def test_a_removed_file_does_not_come_back(world: World, one: Client) -> None:
    """A file that was removed while its bytes were unsent stays removed."""
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"scrap")
    one.local.unlink("f")
    file.write(b"more scrap")
    again = one.again()
    assert world.all_keys() == []
    assert again.fs.uploads.unsent() == []
    assert list((one.directory / "state" / "staging").iterdir()) == []


@promise("S-20")
@pytest.mark.parametrize("change", ["unlink", "rename"])
def test_a_restarted_server_knows_that_the_object_exists(world: World, one: Client, change: str) -> None:
    """A changed file of the earlier process is removed or renamed with its object."""
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


@promise("S-20")
def test_an_unknown_handle_is_answered_by_its_inode(world: World, one: Client) -> None:
    """A handle of an earlier process reads and writes its file."""
    world.put("f", b"abc")
    ino = one.local.stat("f").ino
    assert contents(one, ino, Fh(999)) == b"abc"
    resolve(one.fs.write(ino, Fh(999), 3, memoryview(b"def"), False))
    resolve(one.fs.flush(ino, Fh(999)))
    assert world.body("f") == b"abcdef"
