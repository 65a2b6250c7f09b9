"""The event loop of a mount: its tasks run in one thread, and calls that block run in thread pools ("lanes").

A task runs until it awaits a result that is not there yet. No other task runs in that time, so code between two awaits
needs no lock. A call that blocks (a large body, a sync of the disk) runs in a lane, which is a pool's thread, and its
result comes back to the loop. asyncio needs 17 us for each suspension of a task, this loop 1 us: docs/decisions/0021.
"""

from __future__ import annotations

import concurrent.futures
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
from typing import Any, Generic, ParamSpec, TypeVar, cast

from datastore.errors import MountFailed
from datastore.retry import THIS_THREAD, Call, Work, current_call

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Ready = Callable[[], None]

LANES = 64
"""The most threads for large bodies and for the calls to file servers."""
DISK_LANES = 8
"""The most threads for the local disk; a pool of its own, so that the disk never waits for a storage that is down."""
_EACH_WIDTH = 32
"""For how many items each() works at the same time: half the number of connections to the store."""
_TICK_S = 0.25
"""How often the waits with a timeout are checked."""
_TAKE_OVER_S = 0.02
"""How often a thread in Loop.run() checks whether it has to turn the loop, because no other thread does."""


class _Turned(threading.local):
    loop: Loop | None = None


_TURNED = _Turned()


def running() -> Loop | None:
    """Return the loop that this thread turns, if any. To "turn" a loop is to run its turn() again and again."""
    return _TURNED.loop


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that blocks instead of awaiting, as all code does where running() is None."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    coroutine.close()
    raise RuntimeError("it waits for a loop")


async def pause(seconds: float) -> None:
    """Sleep; the other tasks of this thread's loop run in that time. Without a loop this blocks the thread."""
    loop = running()
    if loop is None:
        time.sleep(seconds)
    else:
        await loop.sleep(seconds)


def in_time(call: Callable[[], T], limit_s: float, name: str) -> T:
    """Return what `call` returns in its own thread, which may continue after limit_s. Errors: TimeoutError, and
    those of the call."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised in the caller's thread
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer.result(limit_s)


class Future(Generic[T]):
    """A result to `await`, which may not be there yet. Only the loop's thread may use it."""

    done = False
    error: BaseException | None = None
    """Why a future that is done has no result."""
    _result: T | None = None
    _callbacks: list[Ready] | None = None

    def set_result(self, result: T) -> None:
        """End the future with its result; only once."""
        self._settle(result, None)

    def set_error(self, error: BaseException) -> None:
        """End the future with an error, which is raised in every task that awaits it; only once."""
        self._settle(None, error)

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        self.done, self._result, self.error = True, result, error
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()

    def on_done(self, callback: Ready) -> None:
        """Call `callback` when the future is done; at once if it is done already."""
        if self.done:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def result(self) -> T:
        """Return the result of a future that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]  # it is done

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self.done:
            yield self
        return self.result()


@dataclass(eq=False)
class Task(Future[T]):
    """A coroutine that runs on a loop, and the future of its result."""

    _loop: Loop
    _coroutine: Coroutine[Any, Any, T]
    _call: Call | None

    @property
    def call(self) -> Call | None:
        """The application's call that the task works for; all requests for one call share a budget of retries."""
        return self._call

    def step(self) -> None:
        """Run to the next await that has to wait, or to the end. The first step may be called by the task's maker."""
        outer = THIS_THREAD.work
        THIS_THREAD.work = self
        try:
            awaited = self._coroutine.send(None)
        except StopIteration as end:
            self._settle(end.value, None)
        except BaseException as error:  # raised in the tasks that await this one
            self._settle(None, error)
        else:
            awaited.on_done(partial(self._loop.runnable.append, self.step))
        finally:
            THIS_THREAD.work = outer


class Lock:
    """A reentrant lock for the tasks of a loop; waiting tasks get it in the order in which they asked."""

    __slots__ = ("_owner", "_waiting", "locked")

    def __init__(self) -> None:
        self._owner: Work | None = None
        self.locked = 0
        """How often the task that holds the lock has acquired it; 0 while the lock is free."""
        self._waiting: deque[tuple[Work | None, Future[None]]] | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock if that needs no waiting; return whether it is acquired. Then release() has to follow."""
        task = THIS_THREAD.work
        if self.locked and (self._owner is not task or task is None):
            return False
        self._owner = task
        self.locked += 1
        return True

    async def acquire(self) -> None:
        """Wait until the lock is acquired; release() has to follow."""
        if self.try_acquire():
            return
        waiting: Future[None] = Future()
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((THIS_THREAD.work, waiting))
        await waiting

    def release(self) -> None:
        """Undo one acquire; the last one hands the lock to the task that has waited longest."""
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


class Wait(Future[None]):
    """A wait of one task at a time, with a timeout, which can be repeated. While no task waits, it counts as done."""

    done = True
    until = 0.0
    """When the timeout ends it, in seconds of the loop's clock."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def begin(self, seconds: float) -> Future[None]:
        """`await` the call of end(). Errors: TimeoutError, up to a quarter of a second late."""
        loop = self.loop
        self.done, self.error = False, None
        self.until = loop.clock() + seconds
        loop.wait(self)
        return self

    def end(self) -> None:
        """Let the task that waits, if any, continue."""
        if not self.done:
            self.loop.waits.remove(self)
            self.set_result(None)


class Semaphore:
    """Lets at most `places` tasks in at a time, in the order in which they asked."""

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
    """Watches descriptors and runs tasks. A function that the loop calls must neither block nor raise.

    Threads: any may call soon(), run() and call(); all else is only for the thread that turns the loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.runnable: deque[Ready] = deque()
        """The next step of each task that can continue."""
        self._poll = select.epoll()
        self._ready: dict[int, Ready] = {}
        self._timers: list[tuple[float, int, Ready]] = []
        self._numbers = count()
        self._ticks: dict[Ready, int] = {}
        """The functions given to every(), each with the number of its present timer."""
        self._at_end: dict[Ready, None] = {}
        self._soon: deque[Ready] = deque()
        self.waits: set[Wait] = set()
        """All waits that tasks are in, checked every _TICK_S: a timer for each would outlive its wait."""
        self._looks = False
        """Whether a check of the waits is scheduled."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._turner = threading.Lock()
        """Held by the thread that turns the loop."""
        self._sought = False
        """Whether a thread in turning() waits for _turner; a thread in run() then lets go of it."""
        self._closed = False
        self._poll.register(self._bell, select.EPOLLIN | select.EPOLLET)  # each write ends a poll; nobody reads it
        self.lanes = Lanes(self, LANES)
        """The threads for calls to the storage."""
        self.disk = Lanes(self, DISK_LANES)
        """The threads for the local disk, and for work that keeps the processor busy."""

    # -- descriptors and time

    def watch(self, fd: int, ready: Ready, events: int = select.EPOLLIN) -> None:
        """Call `ready` whenever one of these events of epoll(7) has come, or the descriptor's other end is closed."""
        self._ready[fd] = ready
        self._poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching the descriptor, which stays open. Idempotent."""
        if self._ready.pop(fd, None) is not None and not self._closed:
            self._poll.unregister(fd)

    def later(self, seconds: float, call: Ready) -> None:
        """Call `call` once, after `seconds`."""
        heappush(self._timers, (self.clock() + seconds, next(self._numbers), call))

    def wait(self, wait: Wait) -> None:
        """Have a wait ended by its timeout."""
        self.waits.add(wait)
        if not self._looks:
            self._looks = True
            self.later(_TICK_S, self._look)

    def _look(self) -> None:
        now = self.clock()
        for wait in [wait for wait in self.waits if now >= wait.until]:
            self.waits.remove(wait)
            wait.set_error(TimeoutError())
        self._looks = bool(self.waits)
        if self._looks:
            self.later(_TICK_S, self._look)

    def every(self, seconds: float, call: Ready) -> None:
        """Call `call` about every `seconds` until never(call)."""
        number = self._ticks[call] = next(self._numbers)

        def tick() -> None:
            if self._ticks.get(call) == number:
                self.later(seconds, tick)
                call()

        self.later(seconds, tick)

    def at_end(self, call: Ready) -> None:
        """Call `call` in close(), after the last turn."""
        self._at_end[call] = None

    def never(self, call: Ready) -> None:
        """Undo every(call) and at_end(call). Idempotent."""
        self._ticks.pop(call, None)
        self._at_end.pop(call, None)

    # -- from other threads

    def soon(self, call: Ready) -> bool:
        """Have the loop call `call` in its next turn; return False when the loop is closed."""
        with self._lock:
            if self._closed:
                return False
            self._soon.append(call)
            if len(self._soon) == 1:
                os.eventfd_write(self._bell, 1)
            return True

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. Until then this thread turns the loop if no other does.
        Errors: MountFailed when the loop is closed before the coroutine's end."""
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
        """Return the result of a function that does not block; it is called on the loop, so no task runs meanwhile."""

        async def called() -> T:
            return function()

        return self.run(called())

    @contextmanager
    def turning(self) -> Iterator[None]:
        """A context in which this thread calls turn(). A thread that turns the loop for its run() stops doing so."""
        self._sought = True
        self.soon(lambda: None)  # ends the poll of the other thread
        with self._turner:
            self._sought = False
            outer, _TURNED.loop = _TURNED.loop, self
            try:
                yield
            finally:
                _TURNED.loop = outer

    # -- tasks

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Task[T]:
        """Have the loop begin a task that works for the present call. The caller has to await it."""
        task = Task(self, coroutine, current_call())
        self.runnable.append(task.step)
        return task

    def background(self, coroutine: Coroutine[Any, Any, T]) -> Task[T]:
        """Have the loop begin a task that works for no call. Nobody has to await it: what it raises is logged."""
        task = Task(self, coroutine, None)

        def ended() -> None:
            if task.error is not None:
                log.error("a task failed", exc_info=task.error)

        task.on_done(ended)
        self.runnable.append(task.step)
        return task

    def lane(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin a call to the storage in a thread; `await` its result."""
        return self.lanes.run(partial(call, *args, **kwargs))

    def on_disk(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin, in a thread, a call that waits for the local disk or computes for long; `await` its result."""
        return self.disk.run(partial(call, *args, **kwargs))

    def aside(self, call: Callable[[], R], name: str) -> Future[R]:
        """Begin a call in a new thread of this name, even if all lanes are busy; `await` its result."""
        future: Future[R] = Future()

        threading.Thread(target=lambda: self.soon(_outcome(future, call)), name=name, daemon=True).start()
        return future

    async def sleep(self, seconds: float) -> None:
        """Sleep; other tasks run in that time."""
        over: Future[None] = Future()
        self.later(seconds, partial(over.set_result, None))
        await over

    async def pause(self) -> None:
        """Let the other tasks that can continue run one step each."""
        over: Future[None] = Future()
        self.runnable.append(partial(over.set_result, None))
        await over

    # -- turning

    def turn(self) -> None:
        """Wait until a descriptor, a task, a timer or another thread's call is ready, and serve all that are."""
        wait_s = self._timers[0][0] - self.clock() if self._timers else None
        due = wait_s is not None and wait_s <= 0
        events = self._poll.poll(0.0 if due or self.runnable or self._soon else wait_s)
        for fd, _ in events:
            ready = self._ready.get(fd)
            if ready is not None:  # a callback before this one may have called unwatch()
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
        """After the last turn: run the functions given to soon() and at_end(), and end the threads. Idempotent."""
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
    """Call `call`; return the function that puts its result or its error into the future, for the loop's thread."""
    try:
        return partial(future.set_result, call())
    except BaseException as error:  # raised in the task that awaits the future
        return partial(future.set_error, error)


@dataclass(slots=True, eq=False)
class _Job:
    """A function that is queued or runs in a lane."""

    function: Callable[[], Any]
    call: Call | None
    future: Future[Any]


class Lanes:
    """A pool of up to `width` threads for functions that block; the threads are started as they are needed."""

    def __init__(self, loop: Loop, width: int) -> None:
        self._loop = loop
        self._width = width
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._unended = 0
        """How many jobs are running or queued."""

    def run(self, call: Callable[[], R]) -> Future[R]:
        """Queue `call` as a part of the call that the present task works for. Only for the loop's thread."""
        future: Future[R] = Future()
        self._queue.put(_Job(call, current_call(), future))
        with self._lock:
            self._unended += 1
            if len(self._threads) < min(self._width, self._unended):
                name = f"lane-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """End each thread when the jobs that are queued by now are done."""
        with self._lock:
            for _ in self._threads:
                self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            THIS_THREAD.work = job
            tell = _outcome(job.future, job.function)
            THIS_THREAD.work = None
            with self._lock:
                self._unended -= 1
            self._loop.soon(tell)
            del job, tell  # a thread that waits for its next job keeps no reference to this one


async def each(call: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], width: int = _EACH_WIDTH) -> list[R]:
    """Await call(item) for all items, `width` at a time; return the results in order. After an error no other item is
    begun, and the first error in that order is raised when all that were begun have ended. Without a loop the calls run
    one after the other."""
    loop = running()
    if loop is None:
        return [await call(item) for item in items]
    waiting = deque(enumerate(items))
    results, errors = dict[int, R](), dict[int, Exception]()

    async def work() -> None:
        while waiting and not errors:
            number, item = waiting.popleft()
            try:
                results[number] = await call(item)
            except Exception as error:  # raised below
                errors[number] = error

    await all_of([loop.spawn(work()) for _ in range(min(width, len(waiting)))])
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in sorted(results)]


async def all_of(tasks: Iterable[Future[T]]) -> list[T]:
    """Wait for all tasks; return their results in order, or raise the first error in that order."""
    ended = list(tasks)
    for task in ended:
        if not task.done:
            over: Future[None] = Future()
            task.on_done(partial(over.set_result, None))
            await over
    return [task.result() for task in ended]
