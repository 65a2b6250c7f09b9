"""What holds when an upload fails or the process dies, and what an earlier process left (docs/SEMANTICS.md)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from datastore.errors import AccessDenied, DatastoreError, ServerFault
from datastore.fuse.ops import Fh, OpenRequest
from datastore.fuse.vfs import build
from datastore.fuse.vfs.upload import upkeep
from tests.clock import EPOCH_NS
from tests.driving import resolve
from tests.faulty import Fault, from_nth, no_faults
from tests.localfs import ME
from tests.mounted import (
    DOWN,
    WRITING,
    Client,
    World,
    around,
    dies_at,
    failing,
    lived,
    no_writes,
    pattern,
    refuse_writes,
)
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise


@promise("S-19")
@pytest.mark.parametrize("how", ["retry", "close", "unmount"])
@pytest.mark.parametrize(("error", "code"), [(DOWN, errno.EIO), (AccessDenied("no"), errno.EACCES)])
def test_a_failed_upload_fails_close(world: World, one: Client, how: str, error: Exception, code: int) -> None:
    """The error is reported, the bytes are readable and listed, and go with the next retry, close, or at unmount.

    Also of an error that does not pass by itself.
    """
    one.faulty.plan = lambda index, method: Fault(error) if method in WRITING else None
    failing(code, one.local.write, "f", b"precious")
    assert world.all_keys() == []
    assert one.local.read("f") == b"precious"
    assert one.local.listdir() == [b"f"]
    world.later(3600)
    assert one.local.read("f") == b"precious"
    (row,) = one.fs.uploads.unsent()
    assert (row["path"], row["bytes"], row["error"]) == ("f", 8, str(error))
    assert row["since"] == EPOCH_NS / 1e9
    one.faulty.plan = no_faults
    if how == "retry":
        assert resolve(one.fs.flush_all()) == []
    elif how == "close":
        with one.local.opened("f", os.O_WRONLY) as file:
            file.write(b"!", 8)
    else:
        one.unmount()
        one = one.again()
    assert world.body("f") == b"precious" + b"!" * (how == "close")
    one.nothing_left()


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
def test_a_last_close_beside_a_flush_that_was_interrupted_leaves_nothing(world: World, one: Client) -> None:
    """The kernel sends it while the task of the flush runs on, and this one succeeds."""
    refuse_writes(one)
    file = one.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(b"precious")
    ino = one.local.stat("f").ino
    with pytest.raises(ServerFault):
        resolve(one.fs.flush(ino, file._fh))
    one.faulty.plan = no_faults

    async def closed() -> None:
        flush = one.fs.core.loop.background(one.fs.flush(ino, file._fh))
        await one.fs.core.loop.pause()
        await one.fs.release(ino, file._fh)
        await flush

    resolve(closed())
    one.fs.forget(ino, 1 << 30)
    assert world.body("f") == b"precious"
    assert ino not in one.fs.core.nodes.by_ino
    one.nothing_left()


@promise("S-19", "S-44")
def test_a_mount_looks_after_its_files_by_itself(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be sent is tried again every 30 s, and no more often; a log is sent when it is quiet. After its
    end nothing is done.
    """
    rounds = list[None]()
    monkeypatch.setattr(upkeep, "_TICK_S", 0.001)
    monkeypatch.setattr(one.fs.kernel_dir_cache, "expire", lambda: rounds.append(None))
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f", b"bytes")
    one.fs.loop.call(one.fs.upkeep.start)
    for tried in (1, 2, 3):
        eventually(lambda tried=tried: one.calls("put") == tried)  # type: ignore[misc]
        rounds.clear()
        eventually(lambda: len(rounds) > 5)
        assert one.calls("put") == tried
        world.clock.advance(30.1)
    one.faulty.plan = no_faults
    log = one.local.open("log", os.O_WRONLY | os.O_CREAT)
    for size in (1, 2):
        log.write(b"x", size - 1)
        world.clock.advance(upkeep.QUIET_S)
        eventually(lambda size=size: world.contents().get("log") == b"x" * size)  # type: ignore[misc]
    resolve(one.fs.upkeep.stop())
    rounds.clear()
    one.fs.loop.run(one.fs.loop.sleep(0.01))
    assert rounds == []


@promise("S-20")
def test_unsent_bytes_are_sent_by_the_next_mount(world: World, one: Client) -> None:
    """A process that dies with an open file loses no byte that was written; what was delivered is not sent again."""
    world.put("old", pattern(10_000))
    one.local.write("sent", b"ours")
    world.put("sent", b"theirs")
    one.local.open("new", os.O_WRONLY | os.O_CREAT, 0o640).write(b"new bytes")
    one.local.open("old", os.O_RDWR).write(b"XXX", 5000)
    again = one.again()
    expected = bytearray(pattern(10_000))
    expected[5000:5003] = b"XXX"
    assert world.contents() == {"new": b"new bytes", "old": expected, "sent": b"theirs"}
    assert world.metadata("new")["mode"] == str(0o100640)
    again.nothing_left()
    assert again.local.read("old") == expected


@promise("S-20")
def test_a_removed_file_does_not_come_back(world: World, one: Client) -> None:
    """A file that was removed while its bytes were unsent stays removed."""
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"scrap")
    one.local.unlink("f")
    file.write(b"more scrap")
    again = one.again()
    assert world.all_keys() == []
    again.nothing_left()


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
    assert bytes(resolve(one.fs.read(ino, Fh(999), 0, 100))) == b"abc"
    resolve(one.fs.write(ino, Fh(999), 3, memoryview(b"def"), False))
    resolve(one.fs.flush(ino, Fh(999)))
    assert world.body("f") == b"abcdef"


A_MOMENT_S = 0.3
"""What one who should wait is given to show that he does not."""


@pytest.fixture
def left(world: World) -> Client:
    """A mount with unsent bytes of 'f' that belong to no node: they could not be sent when it began, and can be now."""
    first = world.client()
    first.local.open("f", os.O_WRONLY | os.O_CREAT).write(b"older")
    again = first.again(plan=no_writes)
    again.faulty.plan = no_faults
    assert [(row["path"], row["error"]) for row in again.fs.uploads.unsent()] == [("f", str(DOWN))]
    return again


class Beside:
    """A call in a thread of its own; join() raises what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def begin(self) -> None:
        """Start, and give it time to go as far as it may."""
        self._made = ThreadPoolExecutor(1).submit(self._call)
        wait([self._made], A_MOMENT_S)

    def join(self) -> object:
        """Wait for its end; return what it returned."""
        return self._made.result(PATIENCE_S)


@promise("S-32")
@pytest.mark.parametrize("how", ["written", "renamed", "retried"])
def test_newer_bytes_are_not_overwritten(world: World, left: Client, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """What is on its way when the file is written anew arrives before that, or not at all; or is retried just then."""
    left.local.write("other", b"newer")
    makes: dict[str, Callable[[], object]] = {
        "written": lambda: left.local.write("f", b"newer"),
        "renamed": lambda: left.local.rename("other", "f"),
        "retried": lambda: resolve(left.fs.flush_all()),
    }
    beside = Beside(makes[how])
    around(monkeypatch, left, "put", beside.begin, lambda: None)
    assert not makes["written" if how == "retried" else "retried"]()
    beside.join()
    for _ in range(2):
        assert world.body("f") == b"newer"
        assert resolve(left.fs.flush_all()) == []
    assert left.fs.uploads.unsent() == []


@promise("S-157", "S-128")
def test_a_power_cut_brings_no_replaced_bytes_back(left: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """That they are not wanted any more is on the disk before the journal forgets the newer ones."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    left.local.write("f", b"newer")
    assert len(synced) == 1


@promise("S-128")
@pytest.mark.parametrize("resumed", [False, True])
def test_of_two_unsent_files_of_one_name_the_newest_is_sent(
    world: World, left: Client, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """The one that an earlier run left, and the one that was written after it and could not be sent either.

    Also where the clock was set back meanwhile, of which a file of another name knows nothing.
    """
    monkeypatch.setattr(world.clock, "time_ns", lambda: EPOCH_NS - 60 * 10**9)
    refuse_writes(left)
    failing(errno.EIO, left.local.write, "e", b"another")
    (other,) = (row["since"] for row in left.fs.uploads.unsent() if row["path"] == "e")
    assert other == EPOCH_NS / 1e9 - 60
    failing(errno.EIO, left.local.write, "f", b"newer")
    again = left.again(plan=no_writes, resumed=resumed)
    assert sorted(str(row["path"]) for row in again.fs.uploads.unsent()) == ["e", "f", "f"][: 2 if resumed else 3]
    assert len(again.fs.core.db.unsent()) == (2 if resumed else 3)
    again.faulty.plan = no_faults
    assert resolve(again.fs.flush_all()) == []
    assert world.contents() == {"e": b"another", "f": b"newer"}
    again.nothing_left()


@promise("S-20")
def test_what_an_earlier_run_left_is_sent_once(world: World, left: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the upkeep and by a flush at the same time."""
    second = Beside(lambda: failures.extend(resolve(left.fs.flush_all())))
    failures: list[str] = []
    around(monkeypatch, left, "put", second.begin, lambda: None)
    before = left.calls("put")
    assert resolve(left.fs.flush_all()) == []
    second.join()
    assert (failures, left.calls("put") - before) == ([], 1)
    assert world.body("f") == b"older"


@promise("S-20")
def test_a_mount_does_not_wait_long_for_what_was_left(
    world: World, left: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent while programs work: a slow line may need hours. Who asks for such a file waits for it."""
    monkeypatch.setattr(build, "LEFT_S", 0.1)
    sent = threading.Event()

    def slow_line(_index: int, method: str) -> None:
        if method == "put" and not sent.is_set():
            assert sent.wait(PATIENCE_S)

    for name in ("g", "h"):
        world.put(name, b"old")
    for name in ("g", "h"):
        left.local.open(name, os.O_WRONLY | os.O_APPEND).write(b" and more", 3)
    there = world.contents()
    again = left.again(plan=slow_line)
    assert sorted(str(row["path"]) for row in again.fs.uploads.unsent()) == ["f", "g", "h"]
    assert again.local.told() == 2
    known = again.fs.core.nodes.root.children[b"g"].ino
    new = Beside(lambda: again.local.read("f"))
    more = Beside(lambda: resolve(again.fs.open(ME, known, OpenRequest(flags=os.O_RDONLY))))
    looked_up = Beside(lambda: again.local.read("h"))
    for each in (new, more, looked_up):
        each.begin()
    assert world.contents() == there
    sent.set()
    assert new.join() == b"older"
    failing(errno.ESTALE, more.join)  # the kernel looks it up again, and so learns the size
    assert again.local.read("g") == looked_up.join() == b"old and more"
    assert eventually(lambda: again.fs.uploads.unsent() == [])
    assert again.calls("put") == 3
    again.nothing_left()


@promise("S-20")
def test_discarding_what_is_being_sent_waits_for_that(left: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is not closed meanwhile."""
    discard = Beside(lambda: resolve(left.fs.uploads.forget("f")))
    around(monkeypatch, left, "put", discard.begin, lambda: None)
    assert resolve(left.fs.flush_all()) == []
    discard.join()
    assert left.fs.uploads.unsent() == []


@promise("S-159")
def test_what_is_sent_while_its_directory_is_renamed_goes_there_too(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename was cut off, and is made again while bytes below, of a file that nobody knows, are on their way."""
    world.put("d/x", b"old")
    one.local.open("d/f", os.O_WRONLY | os.O_CREAT).write(b"unsent")
    one.fs.core.nodelog.rewrite([])
    one.faulty.plan = lambda index, method: dies_at(0)(index, method) if method == "copy" else None
    assert not lived(one.local.rename, "d", "e")
    again = one.again(resumed=True, plan=from_nth(0, DOWN))
    again.faulty.plan = no_faults
    rename = Beside(lambda: again.local.rename("d", "e"))
    around(monkeypatch, again, "put", rename.begin, lambda: None)
    assert resolve(again.fs.flush_all()) == []
    rename.join()
    assert world.contents() == {"e/x": b"old", "e/f": b"unsent"}
    again.nothing_left()


@promise("S-20")
def test_unsent_files_of_an_earlier_run_go_where_their_directory_is_renamed_to(world: World) -> None:
    """Also a change of an object that the rename copies."""
    world.put("d/old", b"older")
    first = world.client()
    for name in ("d/new", "d/old"):
        first.local.open(name, os.O_WRONLY | os.O_CREAT).write(b"newer")
    again = first.again(plan=no_writes)
    again.faulty.plan = no_faults
    again.local.rename("d", "e")
    assert sorted(str(row["path"]) for row in again.fs.uploads.unsent()) == ["e/new", "e/old"]
    assert resolve(again.fs.flush_all()) == []
    assert world.contents() == {"e/new": b"newer", "e/old": b"newer"}
    again.nothing_left()


@promise("S-128")
def test_a_directory_does_not_go_where_unsent_files_belong(world: World) -> None:
    """What is in it would be replaced by them, though it is newer."""
    first = world.client()
    first.local.mkdir("d")
    first.local.open("d/f", os.O_WRONLY | os.O_CREAT).write(b"older")
    again = first.again(plan=no_writes)
    again.faulty.plan = no_faults
    again.local.rmdir("d")
    again.local.mkdir("t")
    again.local.write("t/f", b"newer")
    failing(errno.ENOTEMPTY, again.local.rename, "t", "d")
    assert resolve(again.fs.uploads.forget("d/f")) == 1
    again.local.rename("t", "d")
    assert resolve(again.fs.flush_all()) == []
    assert world.body("d/f") == b"newer"


@promise("S-128", "S-47")
def test_a_conflict_that_waits_for_a_person_blocks_no_directory_rename(world: World) -> None:
    """What lost against another client is never sent, so it is in nobody's way."""
    first = world.client(conflict="fail")
    first.local.mkdir("d")
    file = first.local.open("d/f", os.O_WRONLY | os.O_CREAT)
    file.write(b"loser")
    world.put("d/f", b"winner")
    failing(errno.ESTALE, file.close)
    again = first.again()
    assert [row["stuck"] for row in again.fs.uploads.unsent()] == [True]
    again.local.unlink("d/f")
    again.local.mkdir("t")
    again.local.write("t/f", b"newer")
    again.local.rename("t", "d")
    assert resolve(again.fs.flush_all()) != []
    assert world.body("d/f") == b"newer"


@promise("S-19", "S-47")
@pytest.mark.parametrize("name", ["a\x01b", "\udcff", "x.rclonelink", "d/f"])
def test_bytes_are_dropped_by_the_path_that_is_listed(world: World, name: str) -> None:
    """Also where the key of the object differs from it."""
    one = world.client(prefix="p/")
    one.local.mkdir("d")
    one.faulty.plan = no_writes
    failing(errno.EIO, one.local.write, name, b"unsent")
    (row,) = one.fs.uploads.unsent()
    assert row["path"] == name
    assert resolve(one.fs.uploads.forget(name)) == 1
    one.nothing_left()


@promise("S-19")
def test_only_the_bytes_that_a_person_names_are_dropped(world: World) -> None:
    """Of three files that could not be sent, one is given up; the others are sent later, and so is one that is open."""
    one = world.client()
    one.faulty.plan = no_writes
    for name in ("a", "b", "c"):
        failing(errno.EIO, one.local.write, name, b"unsent")
    file = one.local.open("d", os.O_WRONLY | os.O_CREAT)
    file.write(b"unsent")
    failing(errno.EIO, file.fsync)
    assert resolve(one.fs.uploads.forget("b")) == 1
    with pytest.raises(DatastoreError, match="d: a program still has it open; close it there"):
        resolve(one.fs.uploads.forget("d"))
    assert sorted(str(row["path"]) for row in one.fs.uploads.unsent()) == ["a", "c", "d"]
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert world.all_keys() == ["a", "c", "d"]
