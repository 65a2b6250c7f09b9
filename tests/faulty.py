"""A store whose calls fail on demand: the n-th call, before or after it takes effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from datastore.fuse.loop import running
from datastore.fuse.store.base import ObjectStore
from tests.driving import beside
from tests.memorystore import HookedStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """error: what to raise. after: the call takes effect first, only its answer is lost. alter: changes the answer."""

    error: BaseException | None = None
    after: bool = False
    alter: Callable[[Any], Any] | None = None


Plan = Callable[[int, str], Fault | None]
"""(index of the call from 0, name of the ObjectStore method) -> the fault to inject, or None. It may block, because a
lane (a thread of the loop's pool) calls it."""


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A Plan that does not block: the loop follows it by itself, which takes less time than a lane."""

    plan: Plan

    def __call__(self, index: int, method: str) -> Fault | None:
        return self.plan(index, method)


def no_faults(index: int, method: str) -> Fault | None:
    """The plan of a healthy store. How many calls it gets is how many a sweep has to fail."""
    return None


def nth(n: int, error: BaseException, *, after: bool = False) -> Plan:
    """A plan by which only the n-th call (from 0) fails."""

    def plan(index: int, method: str) -> Fault | None:
        return Fault(error, after) if index == n else None

    return AtOnce(plan)


def from_nth(n: int, error: BaseException, *, after: bool = False) -> Plan:
    """A plan of an outage: the n-th call (from 0) and all that follow fail."""

    def plan(index: int, method: str) -> Fault | None:
        return Fault(error, after) if index >= n else None

    return AtOnce(plan)


class FaultyStore(HookedStore):
    """A store that fails as `plan` says, which may be replaced. `calls` lists the methods called so far."""

    def __init__(self, inner: ObjectStore, plan: Plan = no_faults) -> None:
        super().__init__(inner)
        self.plan = plan
        self.calls: list[str] = []
        self._lock = threading.Lock()

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            index = len(self.calls)
            self.calls.append(method)
        plan, loop = self.plan, running()
        if loop is not None and (plan is no_faults or isinstance(plan, AtOnce)):
            await loop.pause()  # other tasks run meanwhile, as they do when a server is asked
            fault = plan(index, method)
        else:
            fault = await beside(partial(plan, index, method))
        if fault is None:
            return await call()
        if fault.alter is not None:
            return await beside(partial(fault.alter, await call()))
        assert fault.error is not None
        if fault.after:
            await call()
        raise fault.error
