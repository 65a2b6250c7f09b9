"""Many small requests side by side, one after the other on each of a few connections that are held for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from datastore.errors import DeadlineExceeded, NotFound, StoreError, Unreachable

from ...loop import Future, Loop, running
from ..base import Body, GetFeed, GetSink, HeadSink, ObjectInfo, ObjectVersion, Shown
from ..limits import check_count, check_key
from .caller import Caller, Plain
from .messages import Answer, Request, describe, described
from .transport import Transport

T = TypeVar("T")

_LEAST = 2
_CONNECTION_S = 0.0005
"""One connection more for each such time that the server takes for an answer."""
_HICCUP = 4
"""What took so many times as long as it should counts as no longer."""
_STRIKES = 3
"""So many requests without an answer, and the server is asked for no more before the next try."""
_BUSY = 8
"""So many refusals more than answers: the same."""
_ROUNDS = 3
"""The bucket turned out to be elsewhere, or the keys were renewed: so often all that was refused is asked again."""


class Width:
    """How many connections at once are of use for one endpoint: who takes long for an answer, or is far away, is asked
    on more."""

    def __init__(self, limit: int) -> None:
        self.connections = _LEAST
        self._limit = limit
        self._answer_s = 0.0
        """The way there and back, and the server's time; 0: not known yet."""

    def paced(self, seconds: float) -> None:
        """So long the first answer took: what was asked later may have waited for our own requests.

        What took long once was in the way of something else; what did not shows what can be done.
        """
        known = self._answer_s
        self._answer_s = (
            known + (0.1 if seconds > known else 0.5) * (min(seconds, _HICCUP * known) - known) if known else seconds
        )
        self.connections = min(max(_LEAST, math.ceil(self._answer_s / _CONNECTION_S)), self._limit)


class _Question(NamedTuple, Generic[T]):
    about: T
    request: Request
    head: bytes


@dataclass(slots=True)
class _Run(Generic[T]):
    """Questions until there is no other one and all are answered.

    feed: gives the next one, whenever a connection is free for it; None: there is none now. take: is told each answer,
    or why there is none. What they raise ends the run.
    """

    transport: Transport
    width: Width
    feed: Callable[[], _Question[T] | None]
    take: Callable[[T, Answer | StoreError], None]
    at_work: int = 0
    over: Future[None] = field(default_factory=Future)
    strikes: int = 0
    is_paced: bool = False
    error: BaseException | None = None

    async def run(self) -> StoreError | None:
        """Why it ended before all was asked: the server did not answer."""
        loop = running()
        if loop is None:
            raise RuntimeError("many requests need a loop")
        self._begin(loop)
        if self.at_work:
            await self.over
        if self.error is not None and not isinstance(self.error, StoreError):
            raise self.error
        return self.error

    def _begin(self, loop: Loop) -> None:
        """Use as many connections as there is use for."""
        while self.at_work < self.width.connections and (question := self._next()) is not None:
            self.at_work += 1
            loop.spawn(self._one_after_the_other(loop, question))

    def _next(self) -> _Question[T] | None:
        try:
            return self.feed() if self.error is None else None
        except BaseException as error:  # for who asked
            self.error = error
            return None

    async def _one_after_the_other(self, loop: Loop, question: _Question[T] | None) -> None:
        transport, connection, has_place = self.transport, None, False
        try:
            while question is not None:
                held, connection = connection, None
                try:
                    if not has_place:
                        await transport.take_place()
                        has_place = True
                    began = loop.clock()
                    answer: Answer | StoreError
                    answer, connection = await transport.exchange(question.request, question.head, held)
                    if not self.is_paced:
                        self.is_paced = True
                        self.width.paced(loop.clock() - began)
                except StoreError as error:
                    answer = error
                    self.strikes += isinstance(error, DeadlineExceeded | Unreachable)
                    if self.strikes >= _STRIKES and self.error is None:
                        self.error = error
                asked, question = question, self._next()
                self._begin(loop)
                self.take(asked.about, answer)
        except BaseException as error:  # for who asked
            self.error = error
        if connection is not None:
            transport.give_back(connection)
        if has_place:
            transport.leave_place()
        self.at_work -= 1
        if not self.at_work:
            self.over.set_result(None)


class Many:
    """Those of one bucket. head: of one key, which follows the bucket and renews keys."""

    def __init__(self, caller: Caller, head: Callable[[str], Coroutine[Any, Any, ObjectInfo]]) -> None:
        self._caller = caller
        self._head = head
        self._width = Width(caller.place[1].limits.connections)

    async def heads(self, objects: Sequence[Shown], sink: HeadSink) -> None:
        """See ObjectStore.head_many()."""
        check_count(objects)
        left = list(range(len(objects)))
        for _ in range(_ROUNDS):
            plain = await self._caller.plain("HEAD")
            odd = await self._asked(plain, objects, left, sink)
            if not odd:
                return
            first, *left = odd
            await self._alone(first, objects, sink)
            if await self._caller.plain("HEAD") is plain:  # there is no other way to ask
                for number in left:
                    sink(number, odd[number])
                return
        for number in left:
            await self._alone(number, objects, sink)

    async def _alone(self, number: int, objects: Sequence[Shown], sink: HeadSink) -> None:
        try:
            answer: ObjectInfo | StoreError = await self._head(objects[number].key)
        except StoreError as error:
            answer = error
        sink(number, answer)

    async def _asked(
        self, plain: Plain, objects: Sequence[Shown], numbers: Sequence[int], sink: HeadSink
    ) -> dict[int, StoreError]:
        """Ask one endpoint for all, signed with the same keys; the refusals that may have a remedy."""
        request = Request(method="HEAD")
        left, odd = deque(numbers), dict[int, StoreError]()
        refusal: StoreError | None = None
        answered = busy = 0

        def feed() -> _Question[int] | None:
            while left and busy <= answered + _BUSY:
                number = left.popleft()
                key = objects[number].key
                try:
                    check_key(key)
                    return _Question(number, request, plain.head(key))
                except StoreError as error:
                    sink(number, error)
            return None

        def take(number: int, answer: Answer | StoreError) -> None:
            nonlocal refusal, answered, busy
            key = objects[number].key
            told: ObjectInfo | StoreError
            if isinstance(answer, StoreError):
                told = answer
            elif answer.status < 300:
                answered += 1
                try:
                    told = described(key, answer.headers)
                except StoreError as error:
                    told = error
            elif (told := plain.error(key, answer)).transient:
                refusal = told
                busy += 1
            elif isinstance(told, NotFound):
                answered += 1
            else:
                odd[number] = told
                return
            sink(number, told)

        failure = await _Run(plain.transport, self._width, feed, take).run() or refusal
        for number in left:
            assert failure is not None
            sink(number, failure)
        return odd

    async def gets(self, feed: GetFeed, sink: GetSink) -> None:
        """See ObjectStore.get_many(). The bucket is not followed, nor are keys renewed: get() does that.

        Errors: StoreError when the server does not answer, CredentialsInvalid.
        """
        plain = await self._caller.plain("GET")

        def following() -> _Question[ObjectVersion] | None:
            while (wanted := feed()) is not None:
                request = Request(method="GET", expected_bytes=wanted.size, most_bytes=wanted.size)
                try:
                    check_key(wanted.key)
                    return _Question(wanted, request, plain.head(wanted.key, {"if-match": f'"{wanted.etag}"'}))
                except StoreError:
                    sink(wanted, None)
            return None

        def take(wanted: ObjectVersion, answer: Answer | StoreError) -> None:
            told: tuple[Body, ObjectInfo] | None = None
            if isinstance(answer, Answer) and answer.status == 200 and len(answer.body) == wanted.size:
                info = describe(wanted.key, answer.headers, wanted.size)
                if info.etag in {"", wanted.etag}:
                    told = answer.body, info
            sink(wanted, told)

        failure = await _Run(plain.transport, self._width, following, take).run()
        if failure is not None:
            raise failure
