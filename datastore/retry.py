"""Tells for which call of a program a request to the storage is made: all requests for one call share one retry budget
(datastore.fuse.store.retrying)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class Call:
    """One call of a program. All requests for it, by whatever threads, share one budget. Any thread may use it."""

    __slots__ = ("began", "failing_since")

    def __init__(self, began: float) -> None:
        """began: monotonic seconds."""
        self.began = began
        self.failing_since: float | None = None
        """When the budget began that the call's latest request has used up; None when that request was answered."""

    def waiting_since(self, now: float, answered_at: float) -> float:
        """Return when the budget of a request that is made now began. answered_at: the store's last answer to any
        call. The budget began with the call, or with that answer if it came later: time in which the store answered
        does not count. If the call's latest request failed, that request's budget continues."""
        since = min(now, max(self.began, answered_at))
        return since if self.failing_since is None else min(since, self.failing_since)


class Work(Protocol):
    """A unit of work of a thread, such as a task of the mount's loop."""

    @property
    def call(self) -> Call | None:
        """The call for which this is done; None when it is done for no call."""
        ...


class _Errand(NamedTuple):
    call: Call | None


class _Thread(threading.local):
    work: Work | None = None


THIS_THREAD = _Thread()
"""THIS_THREAD.work: what this thread does now. (A ContextVar takes twice the time, at each step of each task.)"""


def current_call() -> Call | None:
    """Return the call that this thread works for, or None."""
    work = THIS_THREAD.work
    return None if work is None else work.call


@contextmanager
def one_call(call: Call | None) -> Iterator[None]:
    """Within the block, this thread works for this call."""
    outer, THIS_THREAD.work = THIS_THREAD.work, _Errand(call)
    try:
        yield
    finally:
        THIS_THREAD.work = outer


@contextmanager
def tried_once() -> Iterator[None]:
    """Within the block, this thread's requests are tried once, until one is answered: for cleaning up after an error,
    where a storage that does not answer has been waited for already."""
    call = Call(time.monotonic())
    call.failing_since = -math.inf
    with one_call(call):
        yield
