"""A session over a socket: every kind of request is answered, in any order and mutilation."""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastore.errors import AccessDenied, Unreachable
from datastore.fuse.kernel import abi
from datastore.fuse.kernel.negotiate import Negotiated, negotiate
from datastore.fuse.kernel.session import Settings
from datastore.fuse.kernel.wire import InitRequest
from datastore.fuse.ops import ROOT_INO, Caller, Entry, Fh, Ino
from tests.memfs import MemFs
from tests.patience import eventually
from tests.promises import promise
from tests.wire import frames
from tests.wire.peer import TIMEOUT_S, Peer

SETTLED: Negotiated = negotiate(InitRequest(45, 131072, (1 << 48) - 1))
SILENT = {"forget", "batch_forget", "interrupt"}
PING = frames.request(abi.STATFS, unique=999)


def filled() -> MemFs:
    filesystem = MemFs()
    filesystem.populate()
    return filesystem


@contextmanager
def begun(filesystem: MemFs | None = None, settings: Settings | None = None) -> Iterator[Peer]:
    """A session after its INIT. filesystem: one that is filled, if not said."""
    with Peer(filesystem or filled(), settings) as peer:
        assert peer.init().error == 0
        yield peer


class Gate:
    """Holds calls until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def pass_through(self) -> None:
        """In a lane."""
        self.entered.release()
        assert self.open.wait(60)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=30)


def test_init_is_answered_and_the_file_system_started_and_stopped_once() -> None:
    filesystem = filled()
    with Peer(filesystem) as peer:
        answer = peer.init()
        assert (answer.error, len(answer.body)) == (0, 64)
    assert (filesystem.started, filesystem.stopped, peer.end) == (1, 1, "closed")


@pytest.mark.parametrize("kind", sorted(set(frames.VALID) - SILENT - {"init"}))
def test_every_kind_of_request_gets_exactly_one_answer(kind: str) -> None:
    with begun() as peer:
        answer = peer.ask(frames.VALID[kind])
        assert answer.unique == 42
        assert -200 < answer.error <= 0
        assert peer.ask(PING).unique == 999


@pytest.mark.parametrize("kind", sorted(SILENT))
def test_what_needs_no_answer_gets_none(kind: str) -> None:
    with begun() as peer:
        peer.send(frames.VALID[kind])
        assert peer.ask(PING).unique == 999


@pytest.mark.parametrize(
    "kind", ["access", "ioctl", "copy_file_range", "lseek", "syncfs", "tmpfile", "statx", "unheard of"]
)
def test_what_is_not_supported_says_enosys(kind: str) -> None:
    with begun() as peer:
        assert peer.ask(frames.VALID[kind]).error == -errno.ENOSYS


def exchange(peer: Peer, frame: bytes) -> None:
    """Send anything; then the session has to answer a question of ours."""
    peer.send(frame)
    peer.send(PING)
    for _ in range(3):
        if peer.receive().unique == 999:
            return
    raise AssertionError("no answer to a good request after a bad one")


@promise("S-42")
@given(st.binary(min_size=1, max_size=400))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_never_end_the_session(frame: bytes) -> None:
    """Whatever comes over the wire, the session answers or refuses and goes on."""
    with Peer(MemFs(), negotiated=SETTLED) as peer:
        assert peer.receive().error == abi.NOTIFY_RESEND
        exchange(peer, frame)


@given(st.sampled_from(sorted(frames.VALID)), st.data())
@settings(max_examples=300)
def test_mutated_requests_never_end_the_session(kind: str, data: st.DataObject) -> None:
    frame = bytearray(frames.VALID[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        frame = frame[: data.draw(st.integers(1, len(frame)))]
        if len(frame) >= 4 and data.draw(st.booleans()):
            frame[:4] = struct.pack("<I", len(frame))
    with Peer(filled(), negotiated=SETTLED) as peer:
        peer.receive()
        exchange(peer, bytes(frame))


def test_a_request_whose_length_lies_is_einval() -> None:
    with begun() as peer:
        assert peer.ask(frames.VALID["lookup"] + b"x").error == -errno.EINVAL


class Failing(MemFs):
    """lookup() raises what it is told to."""

    def __init__(self, error: Exception, *, later: bool) -> None:
        super().__init__(blocking=["lookup"] if later else [])
        self.error = error

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        await super().lookup(caller, parent, name)
        raise self.error


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOTDIR, "x"), errno.ENOTDIR),
        (AccessDenied("no"), errno.EACCES),
        (Unreachable("no"), errno.EIO),
        (RuntimeError("a defect"), errno.EIO),
    ],
)
def test_an_error_becomes_its_errno(error: Exception, number: int, later: bool) -> None:
    with begun(Failing(error, later=later)) as peer:
        assert peer.ask(frames.VALID["lookup"]).error == -number
        assert peer.ask(PING).error == 0


def test_a_defect_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with begun(Failing(RuntimeError("a defect"), later=False)) as peer:
        for _ in range(3):
            peer.ask(frames.VALID["lookup"])
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_fault_of_the_local_disk_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with begun(Failing(OSError(errno.EIO, "the journal cannot be written"), later=True)) as peer:
        assert peer.ask(frames.VALID["lookup"]).error == -errno.EIO
    assert ["the journal cannot be written" in record.getMessage() for record in caplog.records] == [True]


class Held(MemFs):
    """Reads, writes, lookups, creates and flushes wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.populate()
        self.gate = Gate()
        self.flushed: list[Ino] = []
        for name in ("read", "write", "lookup", "create"):
            setattr(self, name, self._held(getattr(self, name)))

    def _held(self, call: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def held(*arguments: object) -> object:
            await self.loop.lane(self.gate.pass_through)
            return await call(*arguments)

        return held

    async def flush(self, ino: Ino, fh: Fh) -> None:
        await self.loop.lane(self.gate.pass_through)
        self.flushed.append(ino)


@pytest.fixture
def held() -> Held:
    return Held()


def writing(content: bytes, ino: int = 1000, unique: int = 10) -> bytes:
    return frames.request(abi.WRITE, frames.rw(0, 0, len(content)) + content, ino=ino, unique=unique)


def reading(ino: int = 1000, unique: int = 10, pid: int = 0) -> bytes:
    return frames.request(abi.READ, frames.rw(0, 0, 6), ino=ino, unique=unique, pid=pid)


def holds_within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether it comes true so soon."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def interrupt(unique: int) -> bytes:
    return frames.request(abi.INTERRUPT, struct.pack("<Q", unique), unique=unique | 1)


def test_requests_go_on_while_others_wait(held: Held) -> None:
    with begun(held) as peer:
        peer.send(reading())
        held.gate.wait_entered()
        assert peer.ask(PING).unique == 999
        held.gate.open.set()
        assert (peer.receive().body) == b"000000"


def test_a_running_request_is_answered_eintr_and_its_result_dropped(held: Held) -> None:
    with begun(held) as peer:
        peer.send(reading())
        held.gate.wait_entered()
        answer = peer.ask(interrupt(10))
        assert (answer.unique, answer.error) == (10, -errno.EINTR)
        held.gate.open.set()
        assert peer.ask(PING).unique == 999
    assert peer.session.in_flight == 0


@promise("S-190")
def test_what_comes_behind_an_interrupted_change_waits_for_its_end(held: Held) -> None:
    """The kernel gives up its lock on the inode with the answer, so the session keeps the order."""
    with begun(held) as peer:
        peer.send(writing(b"old"))
        held.gate.wait_entered()
        assert peer.ask(interrupt(10)).error == -errno.EINTR
        peer.send(writing(b"new", unique=12))
        peer.send(writing(b"yes", 1001, unique=14))
        held.gate.wait_entered()
        assert not held.gate.entered.acquire(timeout=0.2), "only that of another inode has begun"
        held.gate.open.set()
        assert {peer.receive().unique for _ in range(2)} == {12, 14}
    assert [bytes(held.nodes[Ino(ino)].content[:3]) for ino in (1000, 1001)] == [b"new", b"yes"]


def test_what_waits_behind_an_interrupted_change_can_be_interrupted_too(held: Held) -> None:
    with begun(held) as peer:
        peer.send(writing(b"old"))
        held.gate.wait_entered()
        assert peer.ask(interrupt(10)).error == -errno.EINTR
        peer.send(writing(b"new", unique=12))
        assert peer.ask(interrupt(12)).unique == 12
        held.gate.open.set()
    assert bytes(held.nodes[Ino(1000)].content[:3]) == b"old"


@promise("S-190")
def test_an_interrupted_close_is_carried_out(held: Held) -> None:
    """The kernel sends it once."""
    with begun(held) as peer:
        peer.send(frames.VALID["flush"])
        held.gate.wait_entered()
        answer = peer.ask(interrupt(42))
        assert (answer.unique, answer.error) == (42, -errno.EINTR)
        held.gate.open.set()
    assert held.flushed == [1000]


def test_who_is_ended_is_let_go_though_no_interrupt_tells_of_it(held: Held) -> None:
    """The kernel sends none for pages that are read ahead."""
    caller = subprocess.Popen(["sleep", "60"])
    caller.send_signal(signal.SIGSTOP)  # so that it stays between its signal and its end
    os.waitpid(caller.pid, os.WUNTRACED)
    caller.send_signal(signal.SIGQUIT)
    try:
        with begun(held) as peer:
            peer.send(reading(pid=caller.pid))
            peer.send(reading(pid=os.getpid(), unique=12))
            answer = peer.receive()
            assert (answer.unique, answer.error) == (10, -errno.EINTR)
            held.gate.open.set()
            assert peer.receive().unique == 12
    finally:
        caller.kill()
        caller.wait()


def test_what_is_under_way_at_the_end_ends_before_the_file_system_is_stopped(held: Held) -> None:
    peer = Peer(held)
    peer.init()
    peer.send(writing(b"new"))
    held.gate.wait_entered()
    eventually(lambda: peer.session.in_flight == 1)
    closing = threading.Thread(target=peer.close)
    closing.start()
    assert not holds_within(0.3, lambda: held.stopped)
    held.gate.open.set()
    closing.join(TIMEOUT_S)
    assert bytes(held.nodes[Ino(1000)].content[:3]) == b"new"
    assert held.stopped == 1


def test_the_end_waits_for_what_is_under_way_for_a_limited_time(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    with begun(held, Settings(drain_s=0.1)) as peer:
        peer.send(reading())
        held.gate.wait_entered()
    held.gate.open.set()
    assert held.stopped == 1
    assert [record.getMessage() for record in caplog.records] == ["requests still run after the end"]


def test_who_leaves_answers_what_is_under_way_and_nothing_new(held: Held) -> None:
    with begun(held) as peer:
        peer.send(reading())
        held.gate.wait_entered()
        assert not peer.session.leave(0.05)
        peer.send(PING)
        held.gate.open.set()
        assert peer.session.leave(TIMEOUT_S)
        assert peer.receive().unique == 10
        assert not select.select([peer.fileno()], [], [], 0.1)[0]


def test_what_an_abandoned_lookup_and_create_would_have_given_is_taken_back(held: Held) -> None:
    lookup = frames.request(abi.LOOKUP, b"d\0", unique=10)
    new = struct.pack("<4I", os.O_RDWR | os.O_CREAT, stat.S_IFREG | 0o644, 0, 0) + b"new\0"
    create = frames.request(abi.CREATE, new, unique=12)
    with begun(held) as peer:
        for frame, unique in ((lookup, 10), (create, 12)):
            peer.send(frame)
            held.gate.wait_entered()
            assert peer.ask(interrupt(unique)).unique == unique
        held.gate.open.set()
    assert set(held.lookups.values()) == {0}
    assert not held.open_handles


def test_a_waiting_write_keeps_its_bytes_while_others_arrive(held: Held) -> None:
    with begun(held, Settings(buffers=8, drain_s=TIMEOUT_S)) as peer:
        for number in range(6):
            peer.send(writing(b"%04d" % number, 1000 + number, 10 + 2 * number))
        for _ in range(6):
            held.gate.wait_entered()
        held.gate.open.set()
        assert {peer.receive().unique for _ in range(6)} == set(range(10, 22, 2))
    assert [bytes(held.nodes[Ino(1000 + n)].content[:4]) for n in range(6)] == [b"%04d" % n for n in range(6)]


@pytest.mark.parametrize(("buffers", "unanswered"), [(3, 1024), (64, 3)])
def test_the_loop_goes_on_while_there_is_no_room_for_requests(held: Held, buffers: int, unanswered: int) -> None:
    """What the requests wait for may have to come through it."""
    with begun(held, Settings(buffers=buffers, unanswered=unanswered, drain_s=TIMEOUT_S)) as peer:
        for number in range(9):
            peer.send(writing(b"%04d" % number, 1000 + number, 10 + 2 * number))
        eventually(lambda: peer.session.in_flight == 3, "as many as there is room for are under way")
        assert all(held.loop.call(lambda: True) for _ in range(12))
        assert peer.session.in_flight == 3
        held.gate.open.set()
        assert {peer.receive().unique for _ in range(9)} == set(range(10, 28, 2))
    assert not held.loop.soon(lambda: None)


# -- requests that are sent again to a restarted server


def again(opcode: int, body: bytes) -> bytes:
    return frames.request(opcode, body, unique=abi.UNIQUE_RESEND | 50)


def resumed(filesystem: MemFs) -> Peer:
    peer = Peer(filesystem, negotiated=SETTLED)
    assert peer.receive().error == abi.NOTIFY_RESEND
    return peer


@pytest.mark.parametrize("blocking", [(), ("mkdir", "unlink", "rename", "lookup")])
@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (abi.MKDIR, struct.pack("<2I", 0o755, 0) + b"d\0"),
        (abi.SYMLINK, b"link\0target\0"),
        (abi.MKNOD, struct.pack("<4I", stat.S_IFREG | 0o644, 0, 0, 0) + b"node\0"),
        (abi.LINK, struct.pack("<Q", 1000) + b"hard\0"),
        (abi.CREATE, struct.pack("<4I", os.O_CREAT | os.O_EXCL | os.O_RDWR, stat.S_IFREG, 0, 0) + b"node\0"),
        (abi.UNLINK, b"gone\0"),
        (abi.RMDIR, b"gone\0"),
        (abi.RENAME2, struct.pack("<QII", 1, 0, 0) + b"gone\0came\0"),
        (abi.SETXATTR, struct.pack("<2I", 1, os.XATTR_CREATE) + b"user.made\0x"),
        (abi.REMOVEXATTR, b"user.gone\0"),
    ],
)
def test_a_change_that_was_done_before_the_crash_succeeds_when_sent_again(
    opcode: int, body: bytes, blocking: tuple[str, ...]
) -> None:
    filesystem = filled()
    filesystem.make(ROOT_INO, b"node", stat.S_IFREG | 0o644)
    filesystem.make(ROOT_INO, b"hard", stat.S_IFREG | 0o644)
    filesystem.make(ROOT_INO, b"link", stat.S_IFLNK | 0o777)
    filesystem.nodes[ROOT_INO].xattrs[b"user.made"] = b"x"
    filesystem.blocking = frozenset(blocking)
    with resumed(filesystem) as peer:
        answer = peer.ask(again(opcode, body))
        assert (answer.error, answer.unique) == (0, abi.UNIQUE_RESEND | 50), "the reply echoes the bit"


def test_a_change_sent_again_still_fails_for_other_reasons() -> None:
    filesystem = filled()
    filesystem.make(ROOT_INO, b"full", stat.S_IFDIR | 0o755)
    filesystem.make(filesystem.nodes[ROOT_INO].children[b"full"], b"x", stat.S_IFREG)
    with resumed(filesystem) as peer:
        assert peer.ask(again(abi.RMDIR, b"full\0")).error == -errno.ENOTEMPTY


def test_a_first_sending_is_not_forgiven() -> None:
    with begun() as peer:
        assert peer.ask(frames.request(abi.MKDIR, struct.pack("<2I", 0o755, 0) + b"d\0")).error == -errno.EEXIST
        assert peer.ask(frames.request(abi.UNLINK, b"gone\0")).error == -errno.ENOENT


@promise("S-58")
def test_an_open_that_is_sent_again_has_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it the file system knows what the server that died has opened."""
    numbers: list[int] = []
    for serving, unique in ((begun, 50), (resumed, abi.UNIQUE_RESEND | 50)):
        filesystem = filled()
        opens = filesystem.open

        def noted(caller: Caller, *rest: Any, opens: Any = opens) -> Any:
            numbers.append(caller.request)
            return opens(caller, *rest)

        monkeypatch.setattr(filesystem, "open", noted)
        request = frames.request(abi.OPEN, struct.pack("<2I", os.O_RDWR, 0), ino=1000, unique=unique)
        with serving(filesystem) as peer:
            assert peer.ask(request).error == 0
    assert numbers == [50, 50]


@promise("S-58")
@pytest.mark.parametrize("blocking", [(), ("release",)])
def test_an_open_counts_until_its_release_is_answered(
    blocking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies in between gets the RELEASE again, and would count it twice."""
    filesystem = filled()
    filesystem.blocking = frozenset(blocking)
    answered: list[bool] = []
    with begun(filesystem) as peer:

        def released(_ino: int) -> None:
            answered.append(bool(select.select([peer.fileno()], [], [], 0)[0]))

        monkeypatch.setattr(peer.session.modes, "released", released)
        peer.send(frames.request(abi.RELEASE, struct.pack("<QIIQ", 5, 0, 0, 0), ino=1000))
        eventually(lambda: answered, "the release is counted")
        assert answered == [True]
        assert peer.receive().error == 0
