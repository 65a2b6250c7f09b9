"""`conflict: fail`: whoever closes second is told, and nothing of either is lost (docs/SEMANTICS.md)."""

from __future__ import annotations

import errno
import os
from typing import Any, Literal

import pytest

from datastore.errors import PreconditionFailed
from datastore.fuse.data import multipart
from tests.driving import resolve
from tests.faulty import Fault, no_faults
from tests.localfs import File
from tests.mounted import DOWN, Client, World, failing, pattern, taken_over
from tests.promises import promise

PART = 8192


@pytest.fixture
def one(world: World) -> Client:
    return world.client(conflict="fail")


@pytest.fixture
def two(world: World) -> Client:
    return world.client(conflict="fail")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(multipart, "PART_SIZE", PART)
    monkeypatch.setattr(multipart, "SINGLE_MAX", PART)
    monkeypatch.setattr(multipart, "MIB", 4096)
    world.bucket.min_part_bytes = 4096


@promise("S-47")
@pytest.mark.parametrize("size", [10, PART * 3])
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDWR | os.O_TRUNC])
def test_the_second_close_fails(
    world: World, one: Client, two: Client, small_parts: None, size: int, flags: int
) -> None:
    """The first close is what the store keeps; the second one's bytes are kept here, and listed."""
    world.put("f", pattern(size))
    first, second = one.local.open("f", flags), two.local.open("f", flags)
    first.write(b"first")
    second.write(b"second")
    first.close()
    expected = b"first" + (pattern(size)[5:] if not flags & os.O_TRUNC else b"")
    assert world.body("f") == expected
    failing(errno.ESTALE, second.close)
    assert world.body("f") == expected
    (row,) = two.fs.uploads.unsent()
    assert (row["path"], row["stuck"]) == ("f", True)
    assert "another client changed this file" in str(row["error"])
    assert not world.bucket.uploads
    kept = two.directory / "state" / "staging" / str(row["staging"])
    assert kept.read_bytes()[:6] == b"second"


@promise("S-47")
def test_the_second_creator_of_a_name_is_told_and_its_bytes_are_kept(world: World, one: Client, two: Client) -> None:
    """Who creates second is told as well (If-None-Match), and the name shows what won; who writes that again succeeds.

    What was kept goes neither by the retries nor at unmount nor by the next mount; it is discarded by a person.
    """
    first = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    second = two.local.open("f", os.O_WRONLY | os.O_CREAT)
    first.write(b"first")
    second.write(b"second")
    first.close()
    failing(errno.ESTALE, second.close)
    world.later()
    assert world.body("f") == two.local.read("f") == b"first"
    two.local.write("f", b"third")
    puts = two.calls("put")
    assert len(resolve(two.fs.flush_all())) == 1
    two.unmount()
    assert two.calls("put") == puts
    again = two.again()
    assert (world.body("f"), again.calls("put")) == (b"third", 0)
    (row,) = again.fs.uploads.unsent()
    assert (row["stuck"], row["bytes"]) == (True, 6)
    assert resolve(again.fs.uploads.forget("f")) == 1
    again.nothing_left()
    assert resolve(again.fs.uploads.forget("f")) == 0


@promise("S-47")
def test_a_discard_drops_the_file_that_is_listed_so_and_no_other(world: World) -> None:
    """Below a prefix p/ the files f and p/f of the mount are kept as p/f and p/p/f: p/f means the first alone."""
    mount = world.client(conflict="fail", prefix="p/")
    mount.local.mkdir("p")
    for name in ("f", "p/f"):
        file = mount.local.open(name, os.O_WRONLY | os.O_CREAT)
        file.write(b"ours")
        world.put(f"p/{name}", b"theirs")
        failing(errno.ESTALE, file.close)
    assert [row["path"] for row in mount.fs.uploads.unsent()] == ["p/f", "p/p/f"]
    assert resolve(mount.fs.uploads.forget("p/f")) == 1
    assert [row["path"] for row in mount.fs.uploads.unsent()] == ["p/p/f"]
    assert resolve(mount.fs.uploads.forget("p/f")) == 1, "by its path in the mount"
    mount.nothing_left()


@promise("S-32", "S-47")
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("conflict", ["lastWriterWins", "fail"])
def test_a_writer_that_empties_its_changed_file_wins_unless_conflicts_fail(
    world: World, conflict: Literal["lastWriterWins", "fail"], told: bool
) -> None:
    """Nothing of what was there is in it any more: the last close wins, unless that is to be a conflict as well.

    told: by an fsync before that, that another client was first.
    """
    world.put("f", b"0123456789")
    file = world.client(conflict=conflict).local.open("f", os.O_RDWR)
    file.write(b"X", 3)
    world.put("f", b"theirs")
    if told:
        failing(errno.ESTALE, file.fsync)
    file.truncate(0)
    file.write(b"anew")
    if conflict == "fail":
        failing(errno.ESTALE, file.close)
    else:
        file.close()
    assert world.body("f") == (b"theirs" if conflict == "fail" else b"anew")


@promise("S-47", "S-48")
@pytest.mark.parametrize("write_back_s", [0.0, 5.0])
def test_an_fsync_that_fails_goes_on_failing(world: World, one: Client, write_back_s: float) -> None:
    """As long as the file stays open it shows what was written to it; a close tells of what is known by then."""
    two = world.client(conflict="fail", write_back_s=write_back_s)
    second = two.local.open("f", os.O_RDWR | os.O_CREAT)
    second.write(b"second")
    one.local.write("f", b"first")
    failing(errno.ESTALE, second.fsync)
    failing(errno.ESTALE, second.fsync)
    assert second.read() == b"second"
    failing(errno.ESTALE, second.close)
    assert world.body("f") == b"first"


@promise("S-47")
def test_one_writer_never_conflicts_with_itself(world: World, one: Client, small_parts: None) -> None:
    """Fsync, rename, chmod, large and small, again and again."""
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        for turn in range(3):
            file.write(pattern(PART * turn + 10))
            file.fsync()
            one.local.chmod("f", 0o600 + turn)
    one.local.rename("f", "g")
    one.local.mkdir("d")
    with one.local.opened("g", os.O_RDWR) as file:
        file.write(b"x")
        one.local.rename("g", "d/g")
        file.write(b"y", 1)
        one.local.rename("d", "e")
        file.write(b"z", 2)
    with one.local.opened("e/g", os.O_RDWR | os.O_TRUNC) as file:
        one.local.rename("e", "d")
        file.write(b"end")
    assert world.body("d/g") == b"end"
    assert one.fs.uploads.unsent() == []


def sent_without_an_answer(one: Client, size: int) -> File:
    """A file whose upload took effect; its answer was lost."""
    file = one.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(pattern(size))
    lost = Fault(DOWN, after=True)
    one.faulty.plan = lambda index, method: lost if method in ("put", "complete_upload") else None
    failing(errno.EIO, file.fsync)
    return file


@promise("S-47", "S-20")
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("size", [10, PART * 4])
def test_a_lost_answer_is_no_conflict(world: World, one: Client, small_parts: None, size: int, crash: bool) -> None:
    """The upload took effect, its answer was lost, or the process died: what is sent again is ours."""
    file = sent_without_an_answer(one, size)
    one.faulty.plan = no_faults
    if crash:
        one = one.again()
    else:
        file.fsync()
        file.close()
    assert world.body("f") == pattern(size)
    assert one.fs.uploads.unsent() == []


@promise("S-47", "S-25")
def test_a_file_can_be_renamed_after_a_lost_answer(world: World, one: Client) -> None:
    """The version that is there now is ours."""
    world.put("f", b"older")
    file = sent_without_an_answer(one, 10)
    one.faulty.plan = no_faults
    one.local.rename("f", "g")
    file.close()
    assert world.contents() == {"g": pattern(10)}


@promise("S-47", "S-20")
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("later", [0, 5])
@pytest.mark.parametrize("mode", ["fail", "lastWriterWins"])
@pytest.mark.parametrize("old", [0, 5, PART * 4])
def test_bytes_written_after_a_lost_answer_replace_our_own_upload(
    world: World, small_parts: None, mode: Any, later: int, crash: bool, old: int
) -> None:
    """The object in the store is ours, but not what the file has by now, be it as large or larger.

    Of a large file that was there before, only the object has what was not changed.
    """
    if old:
        world.put("f", pattern(old))
    one = world.client(conflict=mode)
    file = sent_without_an_answer(one, 10)
    if crash:
        one, (file,) = taken_over(one, file)
    one.faulty.plan = no_faults
    file.write(b"later" + bytes(later), 5)
    file.fsync()
    assert world.body("f") == pattern(10)[:5] + b"later" + bytes(later) + pattern(old)[10 + later :]
    file.close()
    assert one.fs.uploads.unsent() == []


@promise("S-47", "S-162")
@pytest.mark.parametrize("mode", ["fail", "lastWriterWins"])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_what_another_client_wrote_after_a_lost_answer_is_not_replaced(
    world: World, mode: Any, old: bool, late: bool
) -> None:
    """It is not taken for what was sent before. late: it comes when that was found, and what follows is to be sent."""
    if old:
        world.put("f", b"older")
    one, two = world.client(conflict=mode), world.client(conflict=mode)
    file = sent_without_an_answer(one, 10)
    one.faulty.plan = no_faults
    if late:
        file.write(b"later", 5)
        one.before_next("head", lambda: one.before_next("put", lambda: two.local.write("f", b"theirs")))
    world.later()
    if not late:
        two.local.write("f", b"theirs")
    for _ in range(2):
        failing(errno.ESTALE, file.fsync)
    assert world.body("f") == b"theirs"
    (row,) = one.fs.uploads.unsent()
    assert row["stuck"]


@promise("S-47", "S-20")
@pytest.mark.parametrize("crash", [False, True])
def test_what_follows_a_lost_answer_to_parts_is_kept(world: World, one: Client, small_parts: None, crash: bool) -> None:
    """Parts are sent before the file's times are known: the object may be another client's."""
    file = sent_without_an_answer(one, PART * 4)
    if crash:
        one, (file,) = taken_over(one, file)
    one.faulty.plan = no_faults
    file.write(b"later", PART)
    failing(errno.ESTALE, file.fsync)
    assert world.body("f") == pattern(PART * 4)
    (row,) = one.fs.uploads.unsent()
    assert row["stuck"]
    assert file.read(PART, 5) == b"later"


@promise("S-47")
def test_what_seemed_to_be_there_for_a_moment_is_no_conflict(world: World, one: Client) -> None:
    """The store said that there is another version, and has the one that was opened: the next try succeeds."""
    world.put("f", b"older")
    file = one.local.open("f", os.O_RDWR)
    file.write(b"newer")
    one.faulty.plan = lambda _, method: Fault(PreconditionFailed("another version")) if method == "put" else None
    failing(errno.ESTALE, file.close)
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert world.body("f") == b"newer"


@promise("S-47")
@pytest.mark.parametrize("lost", [False, True])
def test_a_close_that_needs_bytes_of_a_lost_version_fails(world: World, one: Client, lost: bool) -> None:
    """The other client's file has zeros where this one has what is nowhere any more: they are not the same. Or it is
    removed, after an upload whose answer was lost.
    """
    size = 3 << 20
    world.put("f", pattern(size))
    file = one.local.open("f", os.O_RDWR)
    file.write(b"XXX", 10)
    if lost:
        one.faulty.plan = lambda _, method: Fault(DOWN, after=True) if method == "put" else None
        failing(errno.EIO, file.fsync)
        one.faulty.plan = no_faults
        world.tool.delete("f")
    else:
        kept = next(one.fs.core.staging_dir.iterdir()).read_bytes()
        world.put("f", kept)
    failing(errno.ESTALE, file.close)
    (row,) = one.fs.uploads.unsent()
    assert (row["stuck"], row["bytes"]) == (True, size)


@promise("S-47", "S-20")
def test_a_conflict_is_found_by_the_next_mount(world: World, one: Client, two: Client) -> None:
    """The process died before its close: what another client wrote since is not replaced."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR | os.O_TRUNC)
    file.write(b"mine")
    one.kill()
    world.later()
    two.local.write("f", b"theirs")
    again = one.again()
    assert world.body("f") == b"theirs"
    (row,) = again.fs.uploads.unsent()
    assert row["stuck"]
