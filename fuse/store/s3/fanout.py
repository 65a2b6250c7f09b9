"""Many requests by one loop: one at a time on each of several connections.

A thread for each request costs many times the processor. A server that takes long for an answer, or is far away, is
asked on more connections side by side.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from datastore.errors import DeadlineExceeded, StoreError, Unreachable

from ...loop import Loop
from .beside import Beside
from .connections import Connections
from .errors import connection_words
from .http1 import HEAD_BYTES, NOT_NOW, Connection, Heard, HungUp, NotHttp, heard
from .messages import Answer

T = TypeVar("T")

_LANES_MIN = 2
_LANE_S = 0.0005
"""One connection more for each such time that the server takes for an answer."""
_HICCUP = 4
"""What took so many times as long as it should counts as no longer."""
_STRIKES = 3
"""So many requests without an answer, and the endpoint is given up for this time."""
_TICK_S = 0.25
"""How often it is looked who is late."""
_ROOM_BYTES = 4 << 10
"""For the head of an answer; S3's have 1 to 2 KiB."""
_RECORD_BYTES = 16 << 10
"""What TLS hands out at once; asking for more costs the clearing of that."""


class Question(NamedTuple, Generic[T]):
    """A request without a body. about: the asker's; head: as it is sent; body_bytes: of its answer, None: it has none.

    An answer with a body is taken if it is 200 and as long as that.
    """

    about: T
    head: bytes
    body_bytes: int | None = None


Feed = Callable[[], Question[T] | None]
"""The next question, asked for whenever a connection is free; None: there is no other one now. Errors: StoreError,
which ends everything."""
Take = Callable[[T, Answer | StoreError | None], None]
"""Once for what each question is about: the answer, or why there is none; None: the server answered something else than
a body of the right length. What it raises ends everything."""


class FanOut:
    """What is known of one endpoint: how long it takes for an answer. Threads: any."""

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections = connections
        self.clock = clock
        self.lanes = _LANES_MIN
        """Connections at once."""
        self._answer_s = 0.0
        """The way there and back, and the server's time; 0: not known yet."""

    def ask(self, feed: Feed[T], take: Take[T], loop: Loop | None = None) -> StoreError | None:
        """Ask until there is no question left and all are answered; or why no more were taken from `feed`.

        `feed` and `take` are called by the loop, or by this thread without one. Each wait is bounded as in
        Transport.send.
        """
        with closing(Loop(self.clock)) if loop is None else nullcontext(loop) as turned:
            run = _Run(self, feed, take, turned)
            try:
                run.connect()
            except StoreError as error:
                return error
            if not turned.soon(run.start):
                run.leave()
            while loop is None and not run.ended.is_set():
                turned.turn()
            run.ended.wait()  # each of its waits is bounded
        return run.result()

    def paced(self, seconds: float) -> None:
        """So long the first answer took: what was asked later may have waited for our own requests.

        What took long once was in the way of something else; what did not shows what can be done.
        """
        known = self._answer_s
        self._answer_s = (
            known + (0.1 if seconds > known else 0.5) * (min(seconds, _HICCUP * known) - known) if known else seconds
        )
        wanted = math.ceil(self._answer_s / _LANE_S)
        self.lanes = min(max(_LANES_MIN, wanted), self.connections.limits.connections)


class _Lane:
    """A connection, and what has come of the answer to its question."""

    __slots__ = (
        "body",
        "connection",
        "fd",
        "filled",
        "found",
        "heard_at",
        "held",
        "is_plain",
        "kept",
        "question",
        "sent_at",
    )

    def __init__(self, connection: Connection, *, kept: bool) -> None:
        """kept: it lay idle, so the server may have given it up; so it is as long as nothing has come.

        is_plain: the answer is one that the question is about.
        """
        connection.unlimit()
        self.connection = connection
        self.fd = connection.fileno()
        self.kept = kept

    def begin(self, question: Question[Any], now: float) -> None:
        """Send it; before that there is nothing to receive. Errors: OSError."""
        self.question = question
        self.sent_at = self.heard_at = now
        self.held, self.filled, self.is_plain = b"", 0, False
        self.found: Heard | None = None
        self.body: bytearray | None = None
        if self.connection.sock.send(question.head) < len(question.head):
            raise BlockingIOError("a request does not fit into an idle connection")

    def receive(self, now: float) -> Answer | None:
        """What has come by now; the answer when it is whole. Errors: OSError, NotHttp, HungUp."""
        sock, secure = self.connection.sock, self.connection.secure
        while True:
            try:
                if self.body is not None:
                    count = sock.recv_into(memoryview(self.body)[self.filled :])
                    self.filled += count
                else:
                    room = _RECORD_BYTES if secure else (self.question.body_bytes or 0) + _ROOM_BYTES
                    piece = sock.recv(room)
                    count = len(piece)
                    self.held = self.held + piece if self.held else piece
            except NOT_NOW:
                return None
            if not count:
                raise HungUp("the server hung up before the end of its answer")
            self.kept, self.heard_at = False, now
            answer = self._read()
            if answer is not None:
                return answer
            if not secure:  # epoll tells of the rest; of what TLS holds it does not
                return None

    def _read(self) -> Answer | None:
        found, expected = self.found, self.question.body_bytes
        if self.body is not None:
            assert found is not None
            return Answer(found.status, found.fields, self.body) if self.filled == expected else None
        found = heard(self.held, 0)
        while found is not None and found.is_interim:
            if found.end > HEAD_BYTES:
                raise NotHttp("interim answers without an end")
            self.held = self.held[found.end :]
            found = heard(self.held, 0)
        if found is None:
            return None
        self.found = found
        self.is_plain = expected is None or (found.status == 200 and found.length == expected)
        if expected is None or not self.is_plain:
            return Answer(found.status, found.fields, b"")
        body = memoryview(self.held)[found.end :]
        if len(body) >= expected:
            return Answer(found.status, found.fields, body[:expected])
        self.body, self.filled = bytearray(expected), len(body)
        self.body[: self.filled] = body
        return None

    @property
    def goes_on(self) -> bool:
        """After the answer: nothing else came, and the connection can be used again."""
        found = self.found
        assert found is not None
        exact = self.body is not None or len(self.held) == found.end + (self.question.body_bytes or 0)
        return exact and self.is_plain and found.goes_on


class _Run:
    """One call of ask(). INVARIANT each lane has a place of its own, and a question."""

    def __init__(self, known: FanOut, feed: Feed[Any], take: Take[Any], loop: Loop) -> None:
        self._known = known
        self._connections = known.connections
        self._feed = feed
        self._take = take
        self._loop = loop
        self._again: deque[Question[Any]] = deque()
        """What a kept connection took that the server had given up meanwhile."""
        self._lanes: dict[int, _Lane] = {}
        self._beside = Beside(known.connections)
        self._strikes = 0
        self._paced = False
        self._next: Question[Any] | None = None
        """It has no lane yet."""
        self._first: tuple[Connection, bool] | None = None
        """The connection that was there before any question, and whether it lay idle."""
        self._without_s = 0.0
        """For so long there has been no connection at all."""
        self._tick_s = min(_TICK_S, self._connections.limits.idle_s / 4)
        self._error: BaseException | None = None
        self._left: list[Question[Any]] = []
        """Those that are not answered, for there was an error."""
        self.ended = threading.Event()

    def connect(self) -> None:
        """Have a connection for the first question, waiting. Errors: StoreError."""
        self._connections.take_place()
        try:
            kept = self._connections.take_idle()
            self._first = kept or self._connections.connect(self._deadline()), kept is not None
        except BaseException:
            self._connections.leave_place()
            raise

    def start(self) -> None:
        """By the loop's thread, which does the rest."""
        self._loop.every(self._tick_s, self._tick)
        self._loop.at_end(self.leave)
        self._step(lambda: None)  # the beginning follows

    def result(self) -> StoreError | None:
        """Why it ended before all was asked. What else `feed` and `take` raised is raised here."""
        if self._error is not None and not isinstance(self._error, StoreError):
            raise self._error
        return self._error

    def _give_up(self, error: BaseException) -> None:
        """Nothing more will be answered."""
        self._error = error
        self._left = [*(lane.question for lane in self._lanes.values()), *self._again]
        self._left += [self._next] if self._next is not None else []

    def _step(self, act: Callable[[], None]) -> None:
        """Do something, and what follows from it."""
        try:
            act()
            if self._begin() or self._lanes:
                return
        except BaseException as error:  # what `feed` and `take` raise is for who asked
            self._give_up(error)
        self._end()

    def leave(self) -> None:
        """The loop turns no more."""
        self._give_up(Unreachable(f"{self._connections.where()}: the mount ends"))
        self._end()

    # -- connections

    def _deadline(self) -> float:
        return self._known.clock() + self._connections.limits.call_s

    def _begin(self) -> bool:
        """Ask what there is, on as many connections as there is use for; whether a question still waits for one."""
        while self._look() and len(self._lanes) + self._beside.coming < self._known.lanes:
            if self._first is not None:
                (connection, kept), self._first = self._first, None
                self._add(connection, kept=kept)
                continue
            if (self._lanes and self._beside.error is not None) or not self._connections.try_place():
                break
            idle = self._connections.take_idle()
            if idle is not None:
                self._add(idle, kept=True)
                continue
            new = self._beside.fd < 0
            fd = self._beside.connect(self._deadline())
            if new:
                self._loop.watch(fd, partial(self._step, self._arrived))
        return self._next is not None

    def _arrived(self) -> None:
        """Connections were made, or could not be. Errors: StoreError when there is none."""
        for connection in self._beside.arrived():
            self._add(connection, kept=False)
        if self._beside.error is not None and not self._lanes and not self._beside.coming:
            raise self._beside.error

    def _look(self) -> bool:
        """Whether there is something to ask."""
        if self._next is None:
            self._next = self._again.popleft() if self._again else self._feed()
        return self._next is not None

    def _add(self, connection: Connection, *, kept: bool) -> None:
        """A lane more, for the question that waits."""
        lane = _Lane(connection, kept=kept)
        if not self._look():
            self._give_back(lane, keep=True)
            return
        self._lanes[lane.fd] = lane
        self._loop.watch(lane.fd, partial(self._step, partial(self._progress, lane)))
        self._send(lane)

    def _send(self, lane: _Lane) -> None:
        question, self._next = self._next, None
        assert question is not None
        try:
            lane.begin(question, self._known.clock())
        except OSError as error:
            self._lost(lane, error)

    def _drop(self, lane: _Lane, *, keep: bool) -> None:
        self._loop.unwatch(lane.fd)
        del self._lanes[lane.fd]
        self._give_back(lane, keep=keep)

    def _give_back(self, lane: _Lane, *, keep: bool) -> None:
        self._connections.give_back(lane.connection, keep=keep)
        self._connections.leave_place()

    def _end(self) -> None:
        for lane in list(self._lanes.values()):
            self._drop(lane, keep=False)
        if self._first is not None:
            self._connections.give_back(self._first[0], keep=True)
            self._connections.leave_place()
        if self._beside.fd >= 0:
            self._loop.unwatch(self._beside.fd)
        self._beside.end()
        self._loop.never(self._tick)
        self._loop.never(self.leave)
        try:
            if isinstance(self._error, StoreError):
                for question in self._left:
                    self._take(question.about, self._error)
        except BaseException as error:
            self._error = error
        self.ended.set()

    # -- answers

    def _tick(self) -> None:
        """Now and then: whose answer is late?"""
        self._step(self._look_at_lanes)

    def _look_at_lanes(self) -> None:
        """Errors: StoreError when too much went wrong."""
        now = self._known.clock()
        for lane in [lane for lane in self._lanes.values() if now >= self._late_at(lane)]:
            self._lost(lane, TimeoutError())
        self._without_s = 0.0 if self._lanes or self._beside.coming else self._without_s + self._tick_s
        if self._without_s > self._connections.limits.call_s:
            limits = self._connections.limits
            raise DeadlineExceeded(f"{self._connections.where()}: all {limits.connections} connections stayed busy")

    def _late_at(self, lane: _Lane) -> float:
        """When its answer comes too late."""
        limits = self._connections.limits
        whole_s = limits.call_s + (lane.question.body_bytes or 0) / limits.body_floor
        return min(lane.heard_at + limits.idle_s, lane.sent_at + whole_s)

    def _progress(self, lane: _Lane) -> None:
        now = self._known.clock()
        try:
            answer = lane.receive(now)
        except (NotHttp, OSError) as error:
            self._lost(lane, error)
            return
        if answer is None:
            return
        about, plain = lane.question.about, lane.is_plain
        if not self._paced:
            self._paced = True
            self._known.paced(now - lane.sent_at)
        lane.kept = True
        try:
            if not lane.goes_on:
                self._drop(lane, keep=False)
            elif self._look():
                self._send(lane)  # first, so that the server has something to do meanwhile
            else:
                self._drop(lane, keep=True)
        finally:
            self._take(about, answer if plain else None)

    def _lost(self, lane: _Lane, error: Exception) -> None:
        """The connection broke, or is silent. Errors: StoreError, when that was once too often."""
        question = lane.question
        self._drop(lane, keep=False)
        if lane.kept and not isinstance(error, TimeoutError):
            self._again.append(question)
            return
        failure = self._failure(error)
        self._take(question.about, failure)
        self._strikes += 1
        if self._strikes == _STRIKES:
            raise failure from error

    def _failure(self, error: Exception) -> StoreError:
        where = self._connections.where()
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"{where}: no answer in time to one of many requests")
        return Unreachable(f"{where}: {connection_words(error)}")
