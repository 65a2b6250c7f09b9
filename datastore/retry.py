"""For which call of a program something is asked of the storage: all that is, one request after the other, shares one
budget of retries (datastore.fuse.store.retrying)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


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
