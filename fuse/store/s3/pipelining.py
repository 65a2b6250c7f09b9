"""Many HEADs by one thread: in turns over several connections, and several at once on each (RFC 9112, section 9.3.2).

A thread for each request costs ten times the processor (350 us a HEAD against 30, measured). But an answer to a HEAD
does not say of which object it is; only its place does. So a window of several requests is sent only where each answer
can be compared with what is known of its object, only after the server answered smaller windows rightly, and it counts
as a whole or not at all: as many answers as requests, nothing besides, each the one that was to be expected. What was
asked in another window is asked again one by one, and then for _OFF_S nothing is sent to this endpoint but one by one.
"""

from __future__ import annotations

import http.client
import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from datastore.errors import DeadlineExceeded, StoreError, Unreachable

from .beside import Beside
from .connections import Connections
from .errors import connection_words
from .lane import Lane
from .messages import Answer

_DEPTH_MAX = 32
_LANES_MIN = 2
_LANE_S = 0.0005
"""A connection more for each time that the server takes so long: what works for long is asked to work side by side."""
_WAY_S = 0.00005
"""A connection more for each such time that the way there and back takes of a request of a window."""
_WINDOW_S = 0.01
"""A window is what a connection answers in this time, or in twice that of a request that is sent alone, if that is
more: the last of it should not wait for long."""
_HICCUP = 4
"""What took so many times as long as it should counts as no longer."""
_TRIAL = 4
"""So few in a window are taken in turns with one alone: who is asked for so few can't be told from one far away."""
_EACH_MIN_S = 0.00005
"""No server answers faster; what seems so came together."""
_WORTH_IT = 12
"""Fewer in a window, of a server that is fast, cost more of both processors than is won by sharing them out."""
_OFF_S = 600.0
_STRIKES = 3
"""So many requests without an answer, and the endpoint is given up for this time."""


class Questions(Protocol):
    """What is to be asked, by numbers. Called by the thread that asks; take() should not take long."""

    def request(self, number: int) -> bytes:
        """As it is sent. Errors: StoreError, which ends everything."""
        ...

    def is_right(self, number: int, answer: Answer) -> bool:
        """Whether an answer is certainly the one to this question."""
        ...

    def take(self, number: int, answer: Answer | StoreError) -> bool:
        """Once for each number; False: those that were not asked are not to be."""
        ...


class Pipelining:
    """What is known of one endpoint: how far it is, how fast it answers, how many requests at once. Threads: any.

    A distant server that is fast is asked for much at once on a few connections; one that takes its time for each, as
    Amazon's does, on many.
    """

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections = connections
        self.clock = clock
        self._depth = 1
        self._off_until = -math.inf
        self._alone_s = 0.0
        """How long one takes that is sent alone: the way there and back, and the server's time."""
        self._each_s = 0.0
        """How much longer a window takes for each one more of it: the server's time; 0: not known yet."""
        self._trial = 1

    def ask(self, questions: Questions, singly: Iterable[int], together: Iterable[int]) -> list[int]:
        """Ask all; those that were not asked any more. singly: is_right() can't tell of these.

        Each wait is bounded as in Transport.send, and all together as if as many side by side as there may be.
        """
        return _Batch(self, questions, singly, together).run()

    @property
    def depth(self) -> int:
        """Requests in a window."""
        if not self._each_s or self.clock() < self._off_until:
            return 1
        return max(1, min(self._depth, int(max(_WINDOW_S, 2 * self._alone_s) / self._each_s)))

    @property
    def worth(self) -> int:
        """Requests in a window, where there are connections for the rest: fewer cost more of both processors."""
        return max(1, min(_WORTH_IT, int(_WINDOW_S / self._each_s))) if self._each_s else _WORTH_IT

    @property
    def trial(self) -> int:
        """Requests in the window that is to tell how far the server is, or how long it takes for one more."""
        if self.depth > _TRIAL or self.clock() < self._off_until:
            return self.depth
        return min(self._trial, self._depth)

    @property
    def tried(self) -> bool:
        """Whether the server's time is known."""
        return self._each_s > 0

    def lanes(self, depth: int) -> int:
        """Connections at once, for windows of so many."""
        each_s = min(self._each_s or self._alone_s, self._alone_s)
        wanted = each_s / _LANE_S + (self._alone_s - each_s) / depth / _WAY_S
        return min(max(_LANES_MIN, math.ceil(wanted)), self.connections.limits.connections)

    def paced(self, count: int, first_s: float, all_s: float) -> None:
        """So long the first answer to a window took, and all, when little else was asked.

        Some servers send the answers to what came together together: then only how long one takes alone tells them
        apart. What waits behind our own requests says nothing.
        """
        self._trial = _TRIAL if count == 1 else 1
        if count == 1:
            self._alone_s += 0.3 * (all_s - self._alone_s) if self._alone_s else all_s
            return
        self._alone_s = min(self._alone_s or first_s, all_s)
        each_s = max(all_s - first_s, all_s - self._alone_s) / (count - 1)
        self._each_s = max(_smoothed(self._each_s, each_s), _EACH_MIN_S)

    def went_well(self, count: int) -> None:
        """A window of `count` was answered rightly."""
        if count == self._depth < _DEPTH_MAX and self.clock() >= self._off_until:
            self._depth = 2 * count

    def went_wrong(self) -> None:
        """Something came that does not belong to a window of several, or will not go on."""
        self._depth, self._off_until = 1, self.clock() + _OFF_S


class _Batch:
    """One call of ask(): the lanes and what is left. INVARIANT each lane has a place of its own."""

    def __init__(self, known: Pipelining, questions: Questions, singly: Iterable[int], together: Iterable[int]) -> None:
        self._known = known
        self._connections = known.connections
        self._questions = questions
        self._singly, self._together = deque(singly), deque(together)
        self._unasked: list[int] = []
        self._lanes: dict[int, Lane] = {}
        self._poll = select.poll()
        self._beside = Beside(known.connections)
        self._strikes = 0
        self._paced = False
        limits = self._connections.limits
        rounds = 1 + (len(self._singly) + len(self._together)) / limits.connections
        self._deadline = known.clock() + limits.call_s * rounds

    def run(self) -> list[int]:
        """See Pipelining.ask()."""
        try:
            while self._left() or any(lane.window for lane in self._lanes.values()):
                self._widen()
                for lane in list(self._lanes.values()):
                    if not lane.window:
                        self._fill(lane)
                self._wait()
        except StoreError as error:
            self._fail(error)
        finally:
            self._end()
        return self._unasked

    def _left(self) -> int:
        return len(self._singly) + len(self._together)

    # -- connections

    def _widen(self) -> None:
        """As many lanes as there is use for. Errors: StoreError when there is none at all."""
        if not self._lanes and not self._beside.coming:
            self._connections.take_place()
            kept = self._connections.take_idle()
            self._add(kept or self._connect(), kept=kept is not None)
        idle = sum(not lane.window for lane in self._lanes.values())
        depth = self._known.depth
        most = self._known.lanes(1 if self._singly else depth)
        windows = len(self._singly) + math.ceil(len(self._together) / min(depth, self._known.worth))
        while (
            idle + self._beside.coming < windows
            and len(self._lanes) + self._beside.coming < most
            and not self._beside.failed
            and self._connections.try_place()
        ):
            kept = self._connections.take_idle()
            if kept is not None:
                self._add(kept, kept=True)
                idle += 1
            else:
                self._poll.register(self._beside.connect(self._deadline), select.POLLIN)

    def _connect(self) -> http.client.HTTPConnection:
        try:
            return self._connections.connect(self._deadline)
        except BaseException:
            self._connections.leave_place()
            raise

    def _add(self, connection: http.client.HTTPConnection, *, kept: bool) -> None:
        lane = Lane(connection, kept=kept)
        self._lanes[lane.fileno()] = lane
        self._poll.register(lane.fileno(), select.POLLIN)

    def _drop(self, lane: Lane, *, keep: bool = False) -> None:
        self._poll.unregister(lane.fileno())
        del self._lanes[lane.fileno()]
        self._connections.give_back(lane.connection, keep=keep)
        self._connections.leave_place()

    def _end(self) -> None:
        for lane in list(self._lanes.values()):
            self._drop(lane, keep=not lane.window)
        self._beside.end()

    # -- requests

    def _fill(self, lane: Lane) -> None:
        window = self._next()
        if not window:
            return
        if len(window) > 1 and not lane.is_quiet():
            self._together.extendleft(reversed(window))
            self._drop(lane)
            return
        lane.window = window
        requests = b"".join([self._questions.request(number) for number in window])
        try:
            lane.begin(window, requests, self._known.clock())
        except OSError as error:
            self._lost(lane, error)
            return
        if lane.unsent:
            self._poll.modify(lane.fileno(), select.POLLIN | select.POLLOUT)

    def _next(self) -> Sequence[int]:
        if self._singly:
            return (self._singly.popleft(),)
        left = len(self._together)
        share = max(self._known.worth, math.ceil(left / (len(self._lanes) + self._beside.coming)))
        depth = self._known.depth if self._paced and self._known.tried else self._known.trial
        return [self._together.popleft() for _ in range(min(share, left, depth))]

    def _wait(self) -> None:
        """Until something happens. Errors: StoreError when the time is up, or too much went wrong."""
        waiting = [lane for lane in self._lanes.values() if lane.window]
        if not waiting and not self._beside.coming:
            return
        now = self._known.clock()
        if now >= self._deadline:
            raise DeadlineExceeded(f"{self._connections.where()}: no answers in time to many HEADs")
        idle_s = self._connections.limits.idle_s
        until = min((lane.heard_at + idle_s for lane in waiting), default=self._deadline)
        ready = self._poll.poll(max(0, math.ceil((min(until, self._deadline) - now) * 1e3)))
        now = self._known.clock()
        silent = [lane for lane in waiting if now - lane.heard_at >= idle_s]
        for fd, _ in ready:
            if fd == self._beside.fd:
                for connection in self._beside.arrived():
                    self._add(connection, kept=False)
            elif fd in self._lanes:
                lane = self._lanes[fd]
                silent = [each for each in silent if each is not lane]
                self._progress(lane, now)
        for lane in silent:
            self._lost(lane, TimeoutError())

    def _progress(self, lane: Lane, now: float) -> None:
        if not lane.window:
            if not lane.is_quiet():  # a session ticket of TLS is nothing
                self._drop(lane)
            return
        try:
            if lane.unsent:
                lane.send()
                if not lane.unsent:
                    self._poll.modify(lane.fileno(), select.POLLIN)
            lane.receive(now)
        except (http.client.HTTPException, OSError) as error:
            self._lost(lane, error)
            return
        if lane.is_answered:
            self._answered(lane, now)
        elif lane.ended:
            self._lost(lane, http.client.RemoteDisconnected("the server hung up before the end of its answer's head"))

    # -- answers

    def _answered(self, lane: Lane, now: float) -> None:
        """A window is over: believe it or not."""
        window, answers = lane.window, lane.answers
        several = len(window) > 1
        if several and not (lane.is_exact and all(map(self._questions.is_right, window, answers))):
            self._distrust(lane)
            return
        if not self._paced or (several and not self._known.tried):
            self._known.paced(len(window), lane.first_at - lane.sent_at, now - lane.sent_at)
            self._paced = True
        lane.over()
        try:
            if lane.is_exact:
                if answers[0].status < 300:
                    self._known.went_well(len(window))
                self._fill(lane)  # first, so that the server has something to do meanwhile
            else:
                self._known.went_wrong()
                self._drop(lane)
        finally:
            for number, answer in zip(window, answers, strict=True):
                self._take(number, answer)

    def _distrust(self, lane: Lane) -> None:
        self._known.went_wrong()
        self._singly.extend(lane.window)
        self._drop(lane)

    def _lost(self, lane: Lane, error: Exception) -> None:
        """The connection broke, or is silent."""
        window = lane.window
        if lane.kept and not isinstance(error, TimeoutError):
            # A kept connection that the server had given up meanwhile.
            (self._together if len(window) > 1 else self._singly).extendleft(reversed(window))
            self._drop(lane)
        elif len(window) > 1:
            self._distrust(lane)
        else:
            self._drop(lane)
            self._strikes += 1
            failure = self._failure(error)
            self._take(window[0], failure)
            if self._strikes == _STRIKES:
                raise failure from error

    def _failure(self, error: Exception) -> StoreError:
        where = self._connections.where()
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"{where}: no answer in time to HEAD")
        return Unreachable(f"{where}: {connection_words(error)}")

    def _take(self, number: int, answer: Answer | StoreError) -> None:
        if not self._questions.take(number, answer):
            self._unasked += [*self._singly, *self._together]
            self._singly.clear()
            self._together.clear()

    def _fail(self, error: StoreError) -> None:
        """None of the rest will be answered."""
        under_way = [number for lane in self._lanes.values() for number in lane.window]
        for number in (*under_way, *self._singly, *self._together):
            self._questions.take(number, error)


def _smoothed(known: float, seen: float) -> float:
    """What took long once was in the way of something else; what did not shows what can be done."""
    if not known:
        return seen
    return known + (0.1 if seen > known else 0.5) * (min(seen, _HICCUP * known) - known)
