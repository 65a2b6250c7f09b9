"""When and how long to try again: exponential back-off with jitter inside a total budget.

Errors say themselves whether another try makes sense (`DatastoreError.transient`). One layer retries, so delays never
multiply: datastore.fuse.store.retrying for the storage. Nor do they add up: what is asked for one call of a program,
one request after the other, has one budget (Call).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Call:
    """One call of a program: everything that is asked for it, by whatever threads, shares one budget. Threads: any."""

    __slots__ = ("began", "failing_since")

    def __init__(self, began: float) -> None:
        """began: monotonic seconds."""
        self.began = began
        self.failing_since: float | None = None
        """From when on the budget counts that a request of it has used up; None when the latest was answered."""

    def waiting_since(self, now: float, answered_at: float) -> float:
        """From when on the budget of a request counts that is made now. answered_at: the store's last answer to anyone.

        Who waited in vain, or for somebody who did, has that much less; who waited for work that made progress has not.
        """
        since = min(now, max(self.began, answered_at))
        return since if self.failing_since is None else min(since, self.failing_since)


class Work(Protocol):
    """What is done for a call, or for none."""

    @property
    def call(self) -> Call | None:
        """That."""
        ...


class _Errand(NamedTuple):
    call: Call | None


class _Thread(threading.local):
    work: Work | None = None


THIS_THREAD = _Thread()
"""THIS_THREAD.work: what this thread does just now. (A ContextVar takes twice the time, at each step of each task.)"""


def current_call() -> Call | None:
    """The call that this thread works for."""
    work = THIS_THREAD.work
    return None if work is None else work.call


@contextmanager
def one_call(call: Call | None) -> Iterator[None]:
    """What this thread asks for meanwhile is asked for this call."""
    outer, THIS_THREAD.work = THIS_THREAD.work, _Errand(call)
    try:
        yield
    finally:
        THIS_THREAD.work = outer


def carried(job: Callable[P, T]) -> Callable[P, T]:
    """The job for another thread, still as a part of the call that this thread works for."""
    call = current_call()
    if call is None:
        return job

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with one_call(call):
            return job(*args, **kwargs)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """budget_s: from the first try to the start of the last one; 0: a single try.

    Delays double from first_delay_s up to max_delay_s; the upper half of each is jitter, so that clients that failed
    together don't come back together.
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 8.0
    budget_s: float = 60.0

    def delay_s(self, attempt: int, fraction: float) -> float:
        """The wait after the attempt-th try (from 1); fraction in [0, 1) is the jitter's share."""
        whole = min(self.first_delay_s * 2.0 ** min(attempt - 1, 32), self.max_delay_s)
        return whole / 2 + whole / 2 * fraction


@dataclass(frozen=True, slots=True)
class Retrier:
    """A policy, and how its time passes. clock: monotonic seconds; jitter: a fraction in [0, 1)."""

    policy: RetryPolicy = RetryPolicy()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
