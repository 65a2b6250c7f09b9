"""When and how long to try again: exponential back-off with jitter inside a total budget. tenacity runs the loop.

Errors say themselves whether another try makes sense (`DatastoreError.transient`). One layer retries, so delays never
multiply: datastore.fuse.store.retrying for the storage. Nor do they add up: what is asked for one call of a program,
one request after the other, has one budget (Call).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import tenacity

from .errors import DatastoreError

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


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call | None:
    """The call that this thread works for."""
    return _CALL.get()


@contextmanager
def one_call(call: Call | None) -> Iterator[None]:
    """What this thread asks for meanwhile is asked for this call."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def carried(job: Callable[P, T]) -> Callable[P, T]:
    """The job for another thread, still as a part of the call that this thread works for."""
    call = _CALL.get()
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
    """Runs calls under a policy. clock: monotonic seconds; jitter: a fraction in [0, 1). Threads: any."""

    policy: RetryPolicy = RetryPolicy()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random

    def run(
        self,
        call: Callable[[], T],
        on_retry: Callable[[BaseException], None] | None = None,
        since: float | None = None,
    ) -> T:
        """The call's result, after as many tries as it takes. on_retry is told each error that is tried again.

        since: when the budget began; None: now. A first try that lasted for half of it was at work, and the budget
        begins when it broke off. Errors: the last one, as it was raised: not transient, or the budget is spent.
        """
        began = self.clock()
        try:
            return call()
        except DatastoreError as error:
            if not error.transient:
                raise
            first = [error]
        broke_off = self.clock()
        worked = broke_off - began > self.policy.budget_s / 2
        started = broke_off if worked else began if since is None else since

        def again() -> T:
            """The first failure counts as the loop's first try; entered only now, since the loop costs 0.1 ms."""
            if first:
                raise first.pop()
            return call()

        def wait(state: tenacity.RetryCallState) -> float:
            return self.policy.delay_s(state.attempt_number, self.jitter())

        def spent(state: tenacity.RetryCallState) -> bool:
            return self.clock() - started + state.upcoming_sleep > self.policy.budget_s

        def before_sleep(state: tenacity.RetryCallState) -> None:
            failure = state.outcome.exception() if state.outcome is not None else None
            if on_retry is not None and failure is not None:
                on_retry(failure)

        loop = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_transient),
            wait=wait,
            stop=spent,
            sleep=self.sleep,
            before_sleep=before_sleep,
            reraise=True,
        )
        return loop(again)


def is_transient(error: BaseException) -> bool:
    """Another try may succeed."""
    return isinstance(error, DatastoreError) and error.transient
