"""Requests that wait: a bounded pool, and the life of one such request.

Threads: the loop submits and interrupts, workers run and answer. One lock guards every Task.state.
INVARIANT: a task
is QUEUED -> RUNNING -> DONE, or ABANDONED from the first two; whoever makes it DONE or ABANDONED answers, once.
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
from .dispatch import Header, Operation


class State(Enum):
    """Where a task is."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    ABANDONED = 3


class Task:
    """One request and what it holds. buffer: the request's bytes, when the result still needs them (WRITE).

    call: what the requests to the store are made for; it began earlier than this request if that is a second one.
    """

    __slots__ = ("args", "began_ns", "blocking", "buffer", "call", "header", "operation", "state")

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


class Pool:
    """Runs tasks on up to `workers` threads, which start as they are needed; at most `limit` tasks are unanswered."""

    def __init__(self, workers: int, limit: int, answer: Callable[[Task, Any, BaseException | None], None]) -> None:
        """answer(task, result, error) is called on a worker for each task that ran, abandoned or not."""
        self._workers = workers
        self._answer = answer
        self._room = threading.Semaphore(limit)
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._submitted = 0  # by the loop
        self._worked = 0  # under the lock; abandoned tasks keep their worker until they end, so _tasks would not do

    def __len__(self) -> int:
        """Tasks not answered yet."""
        return len(self._tasks)

    def submit(self, task: Task) -> None:
        """Queue it. When `limit` is reached, waits for room: the kernel then waits too, which is the back-pressure."""
        self._room.acquire()
        self._tasks[task.header[2]] = task
        self._submitted += 1
        if len(self._threads) < min(self._workers, self._submitted - self._worked):
            thread = threading.Thread(target=self._work, name=f"fuse-worker-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put(task)

    def task(self, unique: int) -> Task | None:
        """The unanswered task with this number."""
        return self._tasks.get(unique)

    def abandon(self, task: Task) -> bool:
        """Give up waiting for it. True when the caller now has to answer (EINTR); False when it runs on."""
        with self._lock:
            queued = task.state is State.QUEUED and not task.operation.shielded
            if queued or (task.state is State.RUNNING and task.blocking.interruptible):
                task.state = State.ABANDONED
                self._tasks.pop(task.header[2], None)
                return True
            return False

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
                return False
            task.state = State.RUNNING
            return True

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
            self._room.release()
