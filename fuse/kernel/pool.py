"""Requests that wait: a bounded pool, and the life of one such request.

Threads: the loop submits, the loop and `callers` abandon, workers run and answer. One lock guards every Task.state.
INVARIANT: a task is QUEUED -> RUNNING -> DONE, or ABANDONED from the first two; whoever makes it DONE or ABANDONED
answers, once.

A change that is abandoned while it runs goes on. The kernel gives up its lock on the inode with the answer, so from
then on this pool keeps the order: what the kernel would have let wait for that lock waits for the end of the change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from typing import Any

from datastore.retry import Call, one_call

from ..ops import Blocking
from .dispatch import EXCLUSIVE, ORDERED, Header, Operation, inodes_of


class State(Enum):
    """Where a task is."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    ABANDONED = 3


class Task:
    """One request and what it holds. buffer: the request's bytes, when the result still needs them (WRITE).

    call: what the requests to the store are made for; it began earlier than this request if that is a second one.
    followers: what waits for its end.
    """

    __slots__ = ("args", "began_ns", "blocking", "buffer", "call", "followers", "header", "operation", "state")

    def __init__(
        self,
        header: Header,
        operation: Operation,
        args: Any,
        blocking: Blocking[Any],
        buffer: memoryview | None,
        began_ns: int,
        call: Call | None = None,
    ) -> None:
        self.header = header
        self.operation = operation
        self.args = args
        self.blocking = blocking
        self.buffer = buffer
        self.began_ns = began_ns
        self.call = call or Call(began_ns / 1e9)
        self.state = State.QUEUED
        self.followers: list[Task] = []


class Pool:
    """Runs tasks on up to `workers` threads, which start as they are needed.

    No request is read while `limit` tasks are at work or wait.
    """

    def __init__(
        self,
        workers: int,
        limit: int,
        answer: Callable[[Task, Any, BaseException | None], None],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """answer(task, result, error) is called on a worker for each task that ran, abandoned or not; freed() after it,
        when there is room for another one."""
        self._freed = freed
        self._workers = workers
        self._answer = answer
        self._limit = limit
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self.going_on: dict[int, Task] = {}
        """Changes that nobody waits for any more and that still run, by the inodes that they change."""
        self._submitted = 0  # by the loop
        self._worked = 0  # under the lock; abandoned tasks keep their worker until they end, so _tasks would not do

    @property
    def has_room(self) -> bool:
        """Whether fewer than `limit` tasks have a worker or wait for one."""
        return self._submitted - self._worked < self._limit

    def __len__(self) -> int:
        """Tasks not answered yet."""
        return len(self._tasks)

    def submit(self, task: Task) -> None:
        """Queue it. Who submits looks at has_room before it reads the next request: the kernel then waits."""
        self._tasks[task.header[2]] = task
        self._submitted += 1
        if len(self._threads) < min(self._workers, self._submitted - self._worked):
            thread = threading.Thread(target=self._work, name=f"fuse-worker-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        with self._lock:
            self._queue_or_follow(task)

    def _queue_or_follow(self, task: Task) -> None:
        """Behind an interrupted change of the same inode, if there is one. The lock is held."""
        first = self.behind(task.header, task.args)
        if first is None:
            self._queue.put(task)
        else:
            first.followers.append(task)

    def behind(self, header: Header, args: Any) -> Task | None:
        """The interrupted change whose end this request has to wait for."""
        if not self.going_on or header[1] not in ORDERED:
            return None
        return next(filter(None, map(self.going_on.get, inodes_of(header, args))), None)

    def task(self, unique: int) -> Task | None:
        """The unanswered task with this number."""
        return self._tasks.get(unique)

    def unanswered(self) -> list[Task]:
        """Those that somebody waits for."""
        return list(self._tasks.values())

    def abandon(self, task: Task) -> bool:
        """Give up waiting for it: the caller then has to answer (EINTR). False when it has been answered.

        What has begun goes on, and so does what is shielded; the rest is dropped from the queue.
        """
        with self._lock:
            if task.state in (State.DONE, State.ABANDONED):
                return False
            if task.state is State.RUNNING and task.header[1] in EXCLUSIVE:
                self.going_on |= dict.fromkeys(inodes_of(task.header, task.args), task)
            task.state = State.ABANDONED
            self._tasks.pop(task.header[2], None)
            return True

    def finish(self, task: Task) -> bool:
        """Mark it done. False when it was abandoned: then its result is unwanted and it has been answered."""
        with self._lock:
            if task.state is State.ABANDONED:
                return False
            task.state = State.DONE
            self._tasks.pop(task.header[2], None)
            return True

    def stop(self, timeout_s: float) -> bool:
        """Let the workers end after what is queued; False when some still run after timeout_s. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _begin(self, task: Task) -> bool:
        with self._lock:
            if task.state is State.ABANDONED:
                return task.operation.shielded
            task.state = State.RUNNING
            return True

    def _let_follow(self, task: Task) -> None:
        """What waited for the end of an interrupted change goes on. The lock is held."""
        for ino in [ino for ino, other in self.going_on.items() if other is task]:
            del self.going_on[ino]
        for follower in task.followers:
            self._queue_or_follow(follower)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            result, error = None, None
            begun = self._begin(task)
            if begun:
                try:
                    with one_call(task.call):
                        result = task.blocking.fn()
                except BaseException as raised:  # answered as an errno; a worker never dies of it
                    error = raised
            self._answer(task, result, error if begun else InterruptedError())
            with self._lock:
                self._worked += 1
                if task.state is State.ABANDONED:
                    self._let_follow(task)
            self._freed()
