"""Sends many small requests in parallel, on as many connections as are useful."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from datastore.errors import DeadlineExceeded, StoreError, Unreachable

from ...loop import Future, running
from ..base import Body, GetFeed, GetSink, HeadSink, ObjectInfo, ObjectVersion
from ..limits import check_key
from .caller import Caller
from .messages import Request, describe

W = TypeVar("W")

_LEAST = 2
_CONNECTION_S = 0.0005
"""Answer time for each connection, in seconds: a server that takes n times as long gets n connections."""
_HICCUP = 4
"""An answer that took more than this many times the known time counts as this many times."""
_STRIKES = 3
"""After this many requests without an answer, the run ends."""
_BUSY = 8
"""The run also ends when transient refusals exceed the answers by more than this number."""


class Width:
    """How many connections at once are useful for one endpoint: more if its server is slow or far away."""

    def __init__(self, limit: int) -> None:
        self.connections = _LEAST
        self._limit = limit
        self._answer_s = 0.0
        """Seconds that an answer takes, the way there and back included; 0: not known yet."""

    def paced(self, seconds: float) -> None:
        """Learn from the time of the first answer of a run; later requests may have waited for our own.
        A longer time counts little, as something else may have delayed it; a shorter time shows what is possible."""
        known = self._answer_s
        self._answer_s = (
            known + (0.1 if seconds > known else 0.5) * (min(seconds, _HICCUP * known) - known) if known else seconds
        )
        self.connections = min(max(_LEAST, math.ceil(self._answer_s / _CONNECTION_S)), self._limit)


class Many:
    """HEADs and GETs of many objects of one bucket. head: asks for one key."""

    def __init__(self, caller: Caller, head: Callable[[str], Coroutine[Any, Any, ObjectInfo]]) -> None:
        self._caller = caller
        self._head = head
        self._width = Width(caller.place[1].limits.connections)

    async def heads(self, keys: Sequence[str], sink: HeadSink) -> None:
        """See ObjectStore.head_many()."""
        left = iter(range(len(keys)))

        async def ask(number: int) -> StoreError | None:
            answer: ObjectInfo | StoreError
            try:
                answer = await self._head(keys[number])
            except StoreError as error:
                answer = error
            sink(number, answer)
            return answer if isinstance(answer, StoreError) else None

        await self._caller.signer()  # raises once, not for each object, if there are no keys
        failure = await self._side_by_side(partial(next, left, None), ask)
        for number in left:
            assert failure is not None
            sink(number, failure)

    async def gets(self, feed: GetFeed, sink: GetSink) -> None:
        """See ObjectStore.get_many(). Errors: StoreError when the server does not answer, CredentialsInvalid."""

        async def ask(wanted: ObjectVersion) -> StoreError | None:
            told: tuple[Body, ObjectInfo] | None = None
            failure = None
            try:
                check_key(wanted.key)
                headers = {"if-match": f'"{wanted.etag}"'}
                answer = await self._caller.send(
                    Request(
                        method="GET",
                        key=wanted.key,
                        headers=headers,
                        expected_bytes=wanted.size,
                        most_bytes=wanted.size,
                    )
                )
                if answer.status == 200 and len(answer.body) == wanted.size:
                    info = describe(wanted.key, answer.headers, wanted.size)
                    if info.etag in {"", wanted.etag}:
                        told = answer.body, info
            except (DeadlineExceeded, Unreachable) as error:
                failure = error
            except StoreError:
                pass  # a get() of this object tells why
            sink(wanted, told)
            return failure

        await self._caller.signer()  # raises before anything is taken from feed, if there are no keys
        failure = await self._side_by_side(feed, ask)
        if failure is not None:
            raise failure

    async def _side_by_side(
        self, feed: Callable[[], W | None], ask: Callable[[W], Coroutine[Any, Any, StoreError | None]]
    ) -> StoreError | None:
        """Call ask() for all items of feed(), on width.connections connections, and wait until all calls have ended.

        feed: returns the next item when a connection is free; None: there is none now. ask: returns the error if it
        failed. An exception of either ends the run. Return the error for which the run ended early: the server does not
        answer, or is busy.
        """
        loop = running()
        assert loop is not None, "many requests need a loop"
        width, over = self._width, Future[None]()
        at_work, strikes, answered, busy = 1, 0, 0, 0
        began, is_paced = loop.clock(), False
        end: BaseException | None = None

        async def work() -> None:
            """Ask for one item after the other; have another task do the same while there are connections."""
            nonlocal at_work, strikes, answered, busy, is_paced, end
            try:
                while end is None and (wanted := feed()) is not None:
                    if at_work < width.connections:
                        at_work += 1
                        loop.spawn(work())
                    failure = await ask(wanted)
                    if isinstance(failure, DeadlineExceeded | Unreachable):
                        strikes += 1
                    elif failure is not None and failure.transient:
                        busy += 1
                    else:
                        answered += 1
                    if not is_paced and not strikes:
                        is_paced = True
                        width.paced(loop.clock() - began)
                    if (strikes >= _STRIKES or busy > answered + _BUSY) and end is None:
                        end = failure
            except BaseException as error:  # raised below, when all tasks have ended
                end = error
            at_work -= 1
            if not at_work:
                over.set_result(None)

        await work()
        await over
        if end is not None and not isinstance(end, StoreError):
            raise end
        return end
