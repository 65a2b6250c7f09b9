"""The event loop of a mount: one thread that decides, tasks that wait without holding it up, and lanes for what blocks.

A task runs until it awaits something that is not there yet; nothing else runs meanwhile, so that what lies between two
awaits needs no lock. What blocks (large bodies, a sync of the disk) runs in a lane, which is a thread, and its
result comes back to the loop. asyncio does the same for 17 us a suspension, this for 1 us: docs/decisions/0021.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from datastore.errors import DeadlineExceeded, MountFailed
from datastore.retry import THIS_THREAD, Call, Work, current_call

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Ready = Callable[[], None]

LANES = 64
"""Threads for large bodies, and for the calls of file servers."""
DISK_LANES = 8
"""Threads for the local disk, which must not wait for a storage that is down."""
_LOST_S = 1800.0
"""Each call in a lane is bounded by the store's own deadlines; one that takes so long is given up."""
_LOOK_S = 30.0
"""How often it is looked for those."""
_TICK_S = 0.25
"""How often it is looked who waits too long."""
_TAKE_OVER_S = 0.02
"""How soon a thread that waits for its coroutine finds that nobody turns the loop any more."""


class _Turned(threading.local):
    loop: Loop | None = None


_TURNED = _Turned()


def running() -> Loop | None:
    """The loop that this thread turns."""
    return _TURNED.loop


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits by blocking this thread, as all do that find no loop running."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    coroutine.close()
    raise RuntimeError("it waits for a loop")


async def pause(seconds: float) -> None:
    """Let others go on for so long."""
    loop = running()
    if loop is None:
        time.sleep(seconds)
    else:
        await loop.sleep(seconds)


class Future(Generic[T]):
    """A result that is not there yet: `await` it. For the loop's thread only."""

    done = False
    error: BaseException | None = None
    """Why there is no result, of one that is done."""
    _result: T | None = None
    _callbacks: list[Ready] | None = None

    def set_result(self, result: T) -> None:
        """It is there; once."""
        self._settle(result, None)

    def set_error(self, error: BaseException) -> None:
        """Who awaits it gets this raised; once."""
        self._settle(None, error)

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        self.done, self._result, self.error = True, result, error
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()

    def on_done(self, callback: Ready) -> None:
        """Call it when the result is there; at once if it is."""
        if self.done:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def result(self) -> T:
        """The result of one that is done, or what it failed with."""
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]  # it is done

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self.done:
            yield self
        return self.result()


@dataclass(eq=False)
class Task(Future[T]):
    """A coroutine that runs on a loop; its result."""

    _loop: Loop
    _coroutine: Coroutine[Any, Any, T]
    _call: Call | None

    @property
    def call(self) -> Call | None:
        """What it asks the store for is asked for this call."""
        return self._call

    def step(self) -> None:
        """Run until it awaits what is not there, or to its end. Once by who made it, after that by the loop."""
        outer = THIS_THREAD.work
        THIS_THREAD.work = self
        try:
            awaited = self._coroutine.send(None)
        except StopIteration as end:
            self._settle(end.value, None)
        except BaseException as error:  # who awaits it is told
            self._settle(None, error)
        else:
            awaited.on_done(partial(self._loop.runnable.append, self.step))
        finally:
            THIS_THREAD.work = outer


class Lock:
    """For one task at a time, in the order of asking; who holds it may take it again."""

    __slots__ = ("_owner", "_waiting", "locked")

    def __init__(self) -> None:
        self._owner: Work | None = None
        self.locked = 0
        """How often its task has taken it; 0: nobody holds it."""
        self._waiting: deque[tuple[Work | None, Future[None]]] | None = None

    def try_acquire(self) -> bool:
        """Take it if that needs no waiting; release() has to follow."""
        task = THIS_THREAD.work
        if self.locked and (self._owner is not task or task is None):
            return False
        self._owner = task
        self.locked += 1
        return True

    async def acquire(self) -> None:
        """Wait for it; release() has to follow."""
        if self.try_acquire():
            return
        waiting: Future[None] = Future()
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((THIS_THREAD.work, waiting))
        await waiting

    def release(self) -> None:
        """Give it to who waits longest."""
        self.locked -= 1
        if self.locked:
            return
        self._owner = None
        if self._waiting:
            self._owner, waiting = self._waiting.popleft()
            self.locked = 1
            waiting.set_result(None)

    __aenter__ = acquire

    async def __aexit__(self, *_: object) -> None:
        self.release()


class Edge(Future[None]):
    """Tells when a descriptor that never waits may be used again: once for each change (EPOLLET in epoll(7)).

    Who waits has used it until it would have waited, or has asked for an answer since it was last ready; one at a time.
    It is done while nobody waits.
    """

    def __init__(self, loop: Loop, fd: int) -> None:
        self.done = True
        self._loop = loop
        self._until = 0.0
        loop.watch(fd, self._changed, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    def wait(self, seconds: float) -> Future[None]:
        """`await` that something changes. Errors: TimeoutError, up to a quarter of a second late."""
        loop = self._loop
        self.done, self.error = False, None
        self._until = loop.clock() + seconds
        loop.waits.add(self)
        return self

    def _changed(self) -> None:
        if not self.done:
            self._loop.waits.remove(self)
            self.set_result(None)

    def look(self, now: float) -> None:
        """Is it too late?"""
        if not self.done and now >= self._until:
            self._loop.waits.remove(self)
            self.set_error(TimeoutError())


class Bounded(Protocol):
    """A wait that may take too long."""

    def look(self, now: float) -> None:
        """End it if it does, and remove it from those that are looked at."""


class _Waits(set[Bounded]):
    """The waits that are looked at now and then: a timer for each would stay behind when it is over."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop
        self._looks = False

    def add(self, wait: Bounded) -> None:
        super().add(wait)
        if not self._looks:
            self._looks = True
            self._loop.later(_TICK_S, self._look)

    def _look(self) -> None:
        now = self._loop.clock()
        for wait in list(self):
            wait.look(now)
        self._looks = bool(self)
        if self._looks:
            self._loop.later(_TICK_S, self._look)


class Semaphore:
    """For so many tasks at a time, in the order of asking."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        waiting: Future[None] = Future()
        self._waiting.append(waiting)
        await waiting

    async def __aexit__(self, *_: object) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1


class Loop:
    """Calls what belongs to each descriptor that can be read, and runs tasks. What is called must not wait, nor raise.

    Threads: soon(), run() and call() are for any, the rest for the one that turns it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.runnable: deque[Ready] = deque()
        """Steps of tasks that can go on."""
        self._poll = select.epoll()
        self._ready: dict[int, Ready] = {}
        self._timers: list[tuple[float, int, Ready]] = []
        self._numbers = count()
        self._ticks: dict[Ready, int] = {}
        """What is called now and then; the number of its present timer."""
        self._at_end: dict[Ready, None] = {}
        self._soon: deque[Ready] = deque()
        self.waits = _Waits(self)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._turner = threading.Lock()
        """Held by the thread that turns it."""
        self._sought = False
        """A thread waits until it may turn it for good."""
        self._closed = False
        self._poll.register(self._bell, select.EPOLLIN | select.EPOLLET)  # each write ends a wait; nobody reads it
        self.lanes = Lanes(self, LANES)
        """For calls of the storage."""
        self.disk = Lanes(self, DISK_LANES)
        """For the local disk, and what keeps the processor busy."""

    # -- descriptors and time

    def watch(self, fd: int, ready: Ready, events: int = select.EPOLLIN) -> None:
        """Call `ready` whenever there is something to read (or another of these events), or the other side has gone."""
        self._ready[fd] = ready
        self._poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Call nothing for it any more. It is still open. Idempotent."""
        if self._ready.pop(fd, None) is not None and not self._closed:
            self._poll.unregister(fd)

    def later(self, seconds: float, call: Ready) -> None:
        """Call it once when so many seconds are over."""
        heappush(self._timers, (self.clock() + seconds, next(self._numbers), call))

    def every(self, seconds: float, call: Ready) -> None:
        """Call it about so often until never()."""
        number = self._ticks[call] = next(self._numbers)

        def tick() -> None:
            if self._ticks.get(call) == number:
                self.later(seconds, tick)
                call()

        self.later(seconds, tick)

    def at_end(self, call: Ready) -> None:
        """Call it when this loop turns no more."""
        self._at_end[call] = None

    def never(self, call: Ready) -> None:
        """Call it neither now and then nor at the end. Idempotent."""
        self._ticks.pop(call, None)
        self._at_end.pop(call, None)

    # -- from other threads

    def soon(self, call: Ready) -> bool:
        """Have the loop call it in its next turn; False when there will be none."""
        with self._lock:
            if self._closed:
                return False
            self._soon.append(call)
            if len(self._soon) == 1:
                os.eventfd_write(self._bell, 1)
            return True

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end: its result. This thread turns the loop meanwhile, unless another one does.

        MountFailed when the loop is closed before that.
        """
        if _TURNED.loop is self:
            coroutine.close()
            raise RuntimeError("the loop can't wait for itself")
        task, ended = Task(self, coroutine, current_call()), threading.Event()

        def begin() -> None:
            task.on_done(ended.set)
            task.step()

        if not self.soon(begin):
            coroutine.close()
            raise MountFailed("the mount has ended")
        while not ended.is_set():
            if not self._sought and self._turner.acquire(blocking=False):
                outer, _TURNED.loop = _TURNED.loop, self
                try:
                    while not (ended.is_set() or self._sought):
                        if self._closed:
                            raise MountFailed("the mount has ended")
                        self.turn()
                finally:
                    _TURNED.loop = outer
                    self._turner.release()
            else:
                ended.wait(_TAKE_OVER_S)
        return task.result()

    def call(self, function: Callable[[], T]) -> T:
        """What a function that does not wait returns, called on the loop, so that no task changes what it looks at."""

        async def called() -> T:
            return function()

        return self.run(called())

    @contextmanager
    def turning(self) -> Iterator[None]:
        """This thread turns it meanwhile, by turn(). Another one that does so for run() leaves it to this one."""
        self._sought = True
        self.soon(lambda: None)  # ends the turn that it is in
        with self._turner:
            self._sought = False
            outer, _TURNED.loop = _TURNED.loop, self
            try:
                yield
            finally:
                _TURNED.loop = outer

    # -- tasks

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Task[T]:
        """Begin a task in the next turn, as a part of the present call; somebody awaits it."""
        task = Task(self, coroutine, current_call())
        self.runnable.append(task.step)
        return task

    def background(self, coroutine: Coroutine[Any, Any, T]) -> Task[T]:
        """The same of a task that belongs to no call, and that perhaps nobody awaits: what it raises is logged."""
        task = Task(self, coroutine, None)

        def ended() -> None:
            if task.error is not None:
                log.error("a task failed", exc_info=task.error)

        task.on_done(ended)
        self.runnable.append(task.step)
        return task

    def lane(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin a call of the storage, in a thread; `await` its result."""
        return self.lanes.run(partial(call, *args, **kwargs))

    def on_disk(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """The same of one that waits for the local disk, or that takes long without waiting."""
        return self.disk.run(partial(call, *args, **kwargs))

    def aside(self, call: Callable[[], R], name: str) -> Future[R]:
        """Begin a call in a thread of its own, for what no lane may keep from beginning; `await` its result."""
        future: Future[R] = Future()

        threading.Thread(target=lambda: self.soon(_outcome(future, call)), name=name, daemon=True).start()
        return future

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        over: Future[None] = Future()
        self.later(seconds, partial(over.set_result, None))
        await over

    async def pause(self) -> None:
        """Let others run that can."""
        over: Future[None] = Future()
        self.runnable.append(partial(over.set_result, None))
        await over

    # -- turning

    def turn(self) -> None:
        """Wait until something is ready, and serve all that is."""
        wait_s = self._timers[0][0] - self.clock() if self._timers else None
        due = wait_s is not None and wait_s <= 0
        events = self._poll.poll(0.0 if due or self.runnable or self._soon else wait_s)
        for fd, _ in events:
            ready = self._ready.get(fd)
            if ready is not None:  # one that was served before may have ended it
                ready()
        self._call_what_waits()
        runnable = self.runnable
        if runnable:
            for _ in range(len(runnable)):
                runnable.popleft()()
        if due or not events:
            now = self.clock()
            while self._timers and self._timers[0][0] <= now:
                heappop(self._timers)[2]()

    def close(self) -> None:
        """After the last turn: what was to be called soon is, and then what waits for the end. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._call_what_waits()
        while self._at_end:
            call, _ = self._at_end.popitem()
            call()
        self.lanes.close()
        self.disk.close()
        self._poll.close()
        os.close(self._bell)

    def _call_what_waits(self) -> None:
        while self._soon:
            self._soon.popleft()()


def _outcome(future: Future[R], call: Callable[[], R]) -> Ready:
    """Call it: how its end is told, on the loop."""
    try:
        return partial(future.set_result, call())
    except BaseException as error:  # who awaits it is told
        return partial(future.set_error, error)


@dataclass(slots=True, eq=False)
class _Job:
    """What is in a lane or waits for one. call: for which it is done. since: monotonic seconds; when its lane began."""

    function: Callable[[], Any]
    call: Call | None
    future: Future[Any]
    since: float = 0.0


class Lanes:
    """Threads that run what blocks, up to `width` of them; they start as they are needed."""

    def __init__(self, loop: Loop, width: int) -> None:
        self._loop = loop
        self._width = width
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._at_work: set[_Job] = set()
        self._unended = 0
        """Jobs that are at work or wait."""
        self._lost = 0
        """Threads that are still at work on what was given up; others take their places."""
        loop.every(_LOOK_S, self._drop_lost)

    def run(self, call: Callable[[], R]) -> Future[R]:
        """Begin it, as a part of the call that the present task works for. On the loop."""
        future: Future[R] = Future()
        self._queue.put(_Job(call, current_call(), future))
        with self._lock:
            self._unended += 1
            if len(self._threads) - self._lost < min(self._width, self._unended):
                name = f"lane-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """No lane takes anything more than it has."""
        with self._lock:
            for _ in self._threads:
                self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                job.since = self._loop.clock()
                self._at_work.add(job)
            THIS_THREAD.work = job
            tell = _outcome(job.future, job.function)
            THIS_THREAD.work = None
            with self._lock:
                if job not in self._at_work:  # it was given up
                    self._lost -= 1
                    continue
                self._end(job)
            self._loop.soon(tell)
            del job, tell  # a thread that waits for the next one keeps nothing of this one

    def _end(self, job: _Job) -> None:
        """The lock is held."""
        self._at_work.remove(job)
        self._unended -= 1

    def _drop_lost(self) -> None:
        now = self._loop.clock()
        with self._lock:
            lost = [job for job in self._at_work if now - job.since > _LOST_S]
            for job in lost:
                self._end(job)
                self._lost += 1
        for job in lost:
            job.future.set_error(
                DeadlineExceeded("nothing was heard of a request to the store for too long; try again")
            )


async def each(call: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], width: int) -> list[R]:
    """call(item) for all, `width` side by side; results in order. The first error is raised when all have ended.

    Without a loop one after the other, up to the first error.
    """
    loop = running()
    if loop is None:
        return [await call(item) for item in items]
    places = Semaphore(width)

    async def placed(item: T) -> R:
        async with places:
            return await call(item)

    return await all_of([loop.spawn(placed(item)) for item in items])


async def all_of(tasks: Iterable[Future[T]]) -> list[T]:
    """The results in order, when all have ended. The first error is raised then."""
    ended = list(tasks)
    for task in ended:
        if not task.done:
            over: Future[None] = Future()
            task.on_done(partial(over.set_result, None))
            await over
    return [task.result() for task in ended]
