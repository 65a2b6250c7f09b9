"""What is sent while a file is still being written, and that nothing of it is left behind (docs/SEMANTICS.md)."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from datastore.errors import DeadlineExceeded, ServerFault
from datastore.fuse.data import multipart
from datastore.fuse.ops import NOW, SetAttr
from datastore.fuse.state import statedb
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.vfs.upload import delivery
from datastore.fuse.vfs.upload.delivery import Stream
from datastore.retry import Call, current_call, one_call
from tests.driving import resolve
from tests.faulty import Fault, no_faults
from tests.localfs import File
from tests.mounted import DOWN, Client, World, failing, pattern
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise

PART = 8192


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(multipart, "PART_SIZE", PART)
    monkeypatch.setattr(multipart, "SINGLE_MAX", PART)
    world.bucket.min_part_bytes = 4096


def settled(client: Client) -> None:
    """Wait until no part is under way."""
    for node in client.fs.core.nodes.by_ino.values():
        stream = node.staged.stream if node.staged is not None else None
        if isinstance(stream, Stream):
            resolve(stream._wait())


def fail(client: Client, request_name: str, *, after: bool = False) -> None:
    """All requests of a kind; after: only their answers are lost."""
    fault = Fault(DOWN, after)
    client.faulty.plan = lambda index, method: fault if method == request_name else None


def begun(client: Client, parts: int) -> File:
    """An open file of which so many parts are sent, and a part and a half are not."""
    file = client.local.open("f", os.O_RDWR | os.O_CREAT)
    size = PART * (parts + 1) + PART // 2
    content = pattern(size)
    for at in range(0, size, 1000):
        file.write(content[at : at + 1000], at)
    settled(client)
    assert client.calls("upload_part") == parts
    return file


@promise("S-45")
def test_the_close_of_a_sequential_writer_sends_the_tail(world: World, one: Client) -> None:
    """What the writer left behind is sent by then, in one upload."""
    file = begun(one, 5)
    before = one.sent_bytes()
    file.close()
    assert one.sent_bytes() - before == PART + PART // 2
    assert world.body("f") == pattern(PART * 6 + PART // 2)
    assert one.calls("create_upload", "complete_upload", "upload_part") == 2 + 7
    assert one.calls("copy", "put") == 0
    one.nothing_left()


@promise("S-45")
def test_the_close_does_not_wait_before_it_sends_the_tail(world: World, one: Client) -> None:
    """A part that was never sent can't be overtaken by another: it goes beside those that are under way."""
    tail = threading.Event()

    def plan(index: int, method: str) -> None:
        if method == "upload_part" and next(parts) < 2:
            in_time.append(tail.wait(PATIENCE_S))
        elif method == "upload_part":
            tail.set()

    parts, in_time = itertools.count(), list[bool]()
    one.faulty.plan = plan
    content = pattern(PART * 3 + PART // 2)
    with one.local.opened("f", os.O_WRONLY | os.O_CREAT) as file:
        file.write(content)
    assert world.body("f") == content
    assert in_time == [True, True]


@promise("S-45")
def test_a_part_that_was_changed_is_sent_again(world: World, one: Client) -> None:
    """A header that is written last, as archives do it, is what the object gets."""
    file = begun(one, 3)
    file.write(b"HEADER", 10)
    settled(one)
    file.close()
    expected = bytearray(pattern(PART * 4 + PART // 2))
    expected[10:16] = b"HEADER"
    assert world.body("f") == expected
    assert one.calls("upload_part") == 3 + 2 + 1


@promise("S-45")
def test_a_file_written_in_no_order_waits_for_its_close(world: World, one: Client) -> None:
    """What is changed over and over is not sent over and over."""
    file = begun(one, 3)
    expected = bytearray(pattern(PART * 20))
    for turn in range(40):
        at = (turn * 7 % 3) * PART + turn * 100
        file.write(b"%08d" % turn, at)
        expected[at : at + 8] = b"%08d" % turn
        settled(one)
    file.write(bytes(expected[PART * 4 :]), PART * 4)
    settled(one)
    assert one.calls("upload_part") <= 5
    file.close()
    assert world.body("f") == expected


@promise("S-45")
def test_a_file_that_gets_its_size_before_its_bytes_is_sent_once(world: World, one: Client) -> None:
    """What is not written yet is not sent as zeros."""
    content = pattern(PART * 6)
    with one.local.opened("f", os.O_RDWR | os.O_CREAT) as file:
        file.truncate(len(content))
        for at in range(0, len(content), PART):
            file.write(content[at : at + PART], at)
            settled(one)
    assert world.body("f") == content
    assert one.calls("upload_part") == 6


@promise("S-45")
@pytest.mark.parametrize("size", [0, 100, PART, PART + 1, PART * 2, PART * 3 + 5, PART * 9])
def test_a_truncate_while_parts_are_sent_counts(world: World, one: Client, size: int) -> None:
    """Truncated while parts are on their way: the object has the size and bytes of the file."""
    file = begun(one, 3)
    file.truncate(size)
    file.close()
    assert world.body("f") == pattern(PART * 4 + PART // 2)[:size].ljust(size, b"\0")
    one.nothing_left()


@promise("S-45")
def test_a_renamed_file_goes_to_its_new_name(world: World, one: Client) -> None:
    """Renamed while parts are on their way."""
    file = begun(one, 3)
    one.local.rename("f", "g")
    file.write(b"more", PART * 5)
    file.close()
    assert world.all_keys() == ["g"]
    assert world.body("g") == pattern(PART * 4 + PART // 2).ljust(PART * 5, b"\0") + b"more"
    assert not world.bucket.uploads


@promise("S-45")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_file_leaves_no_upload(world: World, one: Client, replaced: bool) -> None:
    """Unlinked, or replaced by a rename, while parts are on their way, and still written."""
    file = begun(one, 3)
    if replaced:
        one.local.write("other", b"other")
        one.local.rename("other", "f")
        one.local.unlink("f")
    else:
        one.local.unlink("f")
    assert not world.bucket.uploads
    file.write(pattern(PART * 20), 0)
    assert file.read() == pattern(PART * 20)
    file.close()
    assert world.all_keys() == []
    one.nothing_left()


@promise("S-45", "S-46")
def test_a_removal_does_not_wait_for_parts_that_wait_themselves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is under way ends; the others are never sent."""
    monkeypatch.setattr(delivery, "WIDTH", 1)
    one, under_way, goes_on = world.client(), threading.Event(), threading.Event()

    def plan(index: int, method: str) -> None:
        if method == "upload_part":
            under_way.set()
            assert goes_on.wait(PATIENCE_S)

    one.faulty.plan = plan
    file = one.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(pattern(PART * 6))
    stream = getattr(one.node("f").staged, "stream", None)
    assert isinstance(stream, Stream)
    assert under_way.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as beside:
        removal = beside.submit(one.local.unlink, "f")
        try:
            eventually(lambda: stream._dropped)
        finally:
            goes_on.set()
        removal.result(PATIENCE_S)
    assert one.calls("upload_part") == 1
    assert not world.bucket.uploads


@promise("S-45")
def test_attributes_that_change_while_parts_are_sent_are_stored_by_one_copy(world: World, one: Client) -> None:
    """Chmod, setxattr and utimens before the close: the object has them, at the price of one copy."""
    file = begun(one, 3)
    one.local.chmod("f", 0o600)
    one.local.setxattr("f", b"user.a", b"b")
    when = 1_600_000_000_123_456_789
    one.local.setattr("f", SetAttr(mtime_ns=when))
    file.close()
    assert world.body("f") == pattern(PART * 4 + PART // 2)
    assert world.metadata("f")["mode"] == str(0o100600)
    assert "xattr" in world.metadata("f")
    other = world.client().local.stat("f")
    assert (other.mtime_ns, other.mode) == (when, 0o100600)
    assert one.calls("copy") == 1
    assert one.fs.uploads.unsent() == []


@promise("S-45")
def test_a_time_that_is_set_while_parts_are_sent_is_stored(world: World, one: Client) -> None:
    """It is not the store's time then, though nothing else has changed."""
    file = begun(one, 3)
    when = 1_600_000_000_123_456_789
    one.local.setattr("f", SetAttr(mtime_ns=when))
    file.close()
    assert world.client().local.stat("f").mtime_ns == when


@promise("S-45", "S-32")
def test_attributes_give_way_to_what_another_client_wrote_since_the_upload(world: World, one: Client) -> None:
    file = begun(one, 3)
    one.local.chmod("f", 0o600)
    one.before_next("copy", lambda: world.put("f", b"theirs"))
    file.close()
    assert resolve(one.fs.flush_all()) == []
    assert world.body("f") == b"theirs"
    one.nothing_left()


@promise("S-45", "S-19")
def test_a_close_fails_whose_attributes_could_not_be_set(world: World, one: Client) -> None:
    """The close fails, the file stays listed, and the next attempt uploads nothing."""
    file = begun(one, 3)
    one.local.chmod("f", 0o600)
    fail(one, "copy")
    failing(errno.EIO, file.close)
    (row,) = one.fs.uploads.unsent()
    assert row["error"] == "the server is down"
    one.faulty.plan = no_faults
    before = one.calls("upload_part", "put")
    assert resolve(one.fs.flush_all()) == []
    assert one.calls("upload_part", "put") == before
    assert world.metadata("f")["mode"] == str(0o100600)
    assert world.body("f") == pattern(PART * 4 + PART // 2)


@promise("S-45")
def test_the_time_of_a_streamed_file_is_the_stores(world: World, one: Client) -> None:
    """Nobody chose its mtime but as now: LastModified is it, for this mount and for others, at no extra request."""
    file = begun(one, 3)
    world.later(100)
    one.local.setattr("f", SetAttr(mtime_ns=NOW))
    requests = len(one.faulty.calls)
    file.close()
    assert not {"head", "copy"} & set(one.faulty.calls[requests:])
    assert "mtime" not in world.metadata("f")
    here, there = one.local.stat("f"), world.client().local.stat("f")
    assert here.mtime_ns == there.mtime_ns == world.tool.head("f").mtime_ns
    world.later()
    assert one.local.stat("f").mtime_ns == here.mtime_ns


@promise("S-45")
def test_a_part_that_fails_is_sent_by_the_close(world: World, one: Client) -> None:
    """The store was away for a moment while the file was written."""
    parts = itertools.count()
    one.faulty.plan = lambda index, method: Fault(DOWN) if method == "upload_part" and next(parts) == 1 else None
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(pattern(PART * 6), 0)
    settled(one)
    file.close()
    assert world.body("f") == pattern(PART * 6)
    assert not world.bucket.uploads


@promise("S-45", "S-46")
def test_an_upload_that_cannot_begin_is_begun_by_the_close(world: World, one: Client) -> None:
    """Also when the answer was lost: nothing stays behind once the next process has run."""
    fail(one, "create_upload", after=True)
    file = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(pattern(PART * 6), 0)
    with pytest.raises(ServerFault):
        settled(one)
    one.faulty.plan = no_faults
    file.close()
    assert world.body("f") == pattern(PART * 6)
    assert len(world.bucket.uploads) == 1
    one.again()
    assert not world.bucket.uploads


@promise("S-45")
def test_a_close_begins_an_upload_that_failed_to_begin(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client
) -> None:
    """It was asked for before: the store may be back by now, as it is for parts that were sent ahead."""
    closing, begun = threading.Event(), itertools.count()
    begins = delivery.Stream.begins

    def plan(index: int, method: str) -> Fault | None:
        return Fault(DOWN) if method == "create_upload" and next(begun) == 0 and closing.wait(PATIENCE_S) else None

    async def waiting(stream: delivery.Stream) -> bool:
        closing.set()
        return await begins(stream)

    monkeypatch.setattr(delivery.Stream, "begins", waiting)
    one.faulty.plan = plan
    with one.local.opened("f", os.O_WRONLY | os.O_CREAT) as file:
        file.write(pattern(PART * 6), 0)
    assert world.body("f") == pattern(PART * 6)
    assert not world.bucket.uploads


@promise("S-109")
@pytest.mark.parametrize("parts", [0, 3])
def test_what_a_close_sends_is_a_part_of_its_call(one: Client, parts: int) -> None:
    """Its parts have its time together, on whatever threads; after an outage they do not begin it anew."""
    file = begun(one, parts) if parts else one.local.open("f", os.O_RDWR | os.O_CREAT)
    asked: list[tuple[str, Call | None]] = []
    one.faulty.plan = lambda _index, method: asked.append((method, current_call()))
    with one_call(Call(0.0)):
        if not parts:
            file.write(pattern(PART * 5), 0)
        file.close()
        assert {call for _, call in asked} == {current_call()}
    assert {"upload_part", "complete_upload"} <= {method for method, _ in asked}


@promise("S-46")
@pytest.mark.parametrize("later", [False, True])
def test_uploads_of_a_dead_process_are_dropped(world: World, one: Client, later: bool) -> None:
    """Only ours, by their ids, also if the store was away at first; the bytes are sent anew."""
    theirs = world.tool.create_upload("f", WriteOptions())
    begun(one, 3)
    again = one.again(resumed=later)
    if later:
        fail(again, "abort_upload")
        resolve(again.fs.uploads.retry([]))
        assert len(world.bucket.uploads) == 2
        again.faulty.plan = no_faults
        resolve(again.fs.uploads.retry([]))
    else:
        assert world.body("f") == pattern(PART * 4 + PART // 2)
    assert set(world.bucket.uploads) == {theirs}
    assert again.fs.core.db.uploads() == []


@promise("S-46")
def test_uploads_whose_answer_was_lost_are_dropped(world: World, one: Client) -> None:
    """We have no id: it is the one of this key that was begun at that time."""
    earlier = world.tool.create_upload("f", WriteOptions())
    world.later(3600)
    fail(one, "create_upload", after=True)
    failing(errno.EIO, one.local.write, "f", pattern(PART * 3))
    one.faulty.plan = no_faults
    neighbour = world.tool.create_upload("f2", WriteOptions())
    assert len(world.bucket.uploads) >= 3
    one.again()
    assert set(world.bucket.uploads) == {earlier, neighbour}
    assert world.body("f") == pattern(PART * 3)


@promise("S-50")
def test_what_fills_the_disk_is_sent_in_parts(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has no room for a note of the upload. To wait for room would be to wait for ever."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = one.local.open("f", os.O_RDWR | os.O_CREAT)
    with monkeypatch.context() as patched:
        patched.setattr(statedb, "_disk_errors", full)
        file.write(pattern(PART * 3), 0)
        file.close()
    assert world.body("f") == pattern(PART * 3)
    assert world.bucket.uploads == {}


@promise("S-45", "S-19", "S-64")
@pytest.mark.parametrize(
    ("request_name", "error", "code"),
    [("complete_upload", DOWN, errno.EIO), ("upload_part", DeadlineExceeded("lost"), errno.ETIMEDOUT)],
)
def test_a_failed_close_leaves_nothing(
    world: World, one: Client, request_name: str, error: Exception, code: int
) -> None:
    """It fails when a part is lost; what is under way is given up; the bytes stay here, and go whole later."""
    file = begun(one, 3)
    failing_once = iter((Fault(error),))
    one.faulty.plan = lambda index, method: next(failing_once, None) if method == request_name else None
    failing(code, file.close)
    assert not world.bucket.uploads
    assert resolve(one.fs.flush_all()) == []
    assert world.body("f") == pattern(PART * 4 + PART // 2)


@promise("S-158", "S-46")
@pytest.mark.parametrize("answered", [True, False])
def test_the_upload_of_what_is_written_now_is_no_dead_process_s(world: World, one: Client, answered: bool) -> None:
    """The process died while it asked for an upload of the same key; whether our own has its id by now."""
    one.fs.core.db.upload_begun("f", one.fs.core.clock.time_ns())
    world.tool.create_upload("f", WriteOptions())
    after = one.again(resumed=True)
    if answered:
        file = begun(after, 3)
        assert resolve(after.fs.uploads.retry([])) == []
    else:
        retried = Fault(alter=lambda answer: (resolve(after.fs.uploads.retry([])), answer)[1])
        after.faulty.plan = lambda index, method: retried if method == "create_upload" else None
        file = begun(after, 3)
        assert len(list(world.tool.pending_uploads(""))) == 2
    file.close()
    assert world.body("f") == pattern(PART * 4 + PART // 2)
    assert resolve(after.fs.uploads.retry([])) == []
    after.nothing_left()
