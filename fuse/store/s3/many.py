"""Many small requests side by side, one after the other on each of a few connections that are held for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from datastore.errors import DeadlineExceeded, NotFound, StoreError, Unreachable

from ...loop import Future, running
from ..base import Body, Capabilities, GetFeed, GetSink, HeadSink, ObjectInfo, ObjectVersion, Shown
from ..limits import check_head_count, check_key
from .answers import describe, described
from .caller import Caller, Plain
from .http1 import Connection
from .messages import Answer, Request
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


class _Run(Generic[T]):
    """Questions until there is no other one and all are answered.

    feed: gives the next one, whenever a connection is free for it; None: there is none now. take: is told each answer,
    or why there is none. What they raise ends the run.
    """

    def __init__(
        self,
        transport: Transport,
        width: Width,
        feed: Callable[[], _Question[T] | None],
        take: Callable[[T, Answer | StoreError], None],
    ) -> None:
        loop = running()
        if loop is None:
            raise RuntimeError("many requests need a loop")
        self._loop = loop
        self._transport = transport
        self._width = width
        self._feed = feed
        self._take = take
        self._at_work = 0
        self._over: Future[None] = Future()
        self._strikes = 0
        self._is_paced = False
        self._error: BaseException | None = None

    async def run(self) -> StoreError | None:
        """Why it ended before all was asked: the server did not answer."""
        self._begin()
        if self._at_work:
            await self._over
        if self._error is not None and not isinstance(self._error, StoreError):
            raise self._error
        return self._error

    def _begin(self) -> None:
        """Use as many connections as there is use for."""
        while self._at_work < self._width.connections and (question := self._next()) is not None:
            self._at_work += 1
            self._loop.spawn(self._one_after_the_other(question))

    def _next(self) -> _Question[T] | None:
        try:
            return self._feed() if self._error is None else None
        except BaseException as error:  # for who asked
            self._error = error
            return None

    async def _one_after_the_other(self, question: _Question[T] | None) -> None:
        connections = self._transport
        connection: Connection | None = None
        has_place = False
        while question is not None:
            try:
                if not has_place:
                    await connections.take_place()
                    has_place = True
                began = self._loop.clock()
                answer: Answer | StoreError
                answer, connection = await self._transport.exchange(question.request, question.head, connection)
                if not self._is_paced:
                    self._is_paced = True
                    self._width.paced(self._loop.clock() - began)
            except StoreError as error:
                answer, connection = error, None
                self._struck(error)
            except BaseException as error:  # for who asked
                self._error, connection = error, None
                break
            asked, question = question, self._next()
            self._begin()
            try:
                self._take(asked.about, answer)
            except BaseException as error:  # for who asked
                self._error = error
        if connection is not None:
            connections.give_back(connection)
        if has_place:
            connections.leave_place()
        self._at_work -= 1
        if not self._at_work:
            self._over.set_result(None)

    def _struck(self, error: StoreError) -> None:
        self._strikes += isinstance(error, DeadlineExceeded | Unreachable)
        if self._strikes >= _STRIKES and self._error is None:
            self._error = error


async def head_many(
    caller: Caller,
    capabilities: Capabilities,
    head: Callable[[str], Coroutine[Any, Any, ObjectInfo]],
    objects: Sequence[Shown],
    sink: HeadSink,
    width: Width,
) -> None:
    """See ObjectStore.head_many(). head: of one key, which follows the bucket and renews keys."""
    check_head_count(objects)
    left = list(range(len(objects)))

    async def alone(number: int) -> None:
        try:
            answer: ObjectInfo | StoreError = await head(objects[number].key)
        except StoreError as error:
            answer = error
        sink(number, answer)

    for _ in range(_ROUNDS):
        plain = await caller.plain("HEAD")
        odd = await _heads(plain, capabilities, objects, left, sink, width)
        if not odd:
            return
        first, *left = odd
        await alone(first)
        if await caller.plain("HEAD") is plain:  # there is no other way to ask
            for number in left:
                sink(number, odd[number])
            return
    for number in left:
        await alone(number)


async def _heads(
    plain: Plain,
    capabilities: Capabilities,
    objects: Sequence[Shown],
    numbers: Sequence[int],
    sink: HeadSink,
    width: Width,
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
                check_key(key, capabilities)
                return _Question(number, request, plain.head(key))
            except StoreError as error:
                sink(number, error)
        return None

    def take(number: int, answer: Answer | StoreError) -> None:
        nonlocal refusal, answered, busy
        key = objects[number].key
        if isinstance(answer, StoreError):
            sink(number, answer)
        elif answer.status < 300:
            answered += 1
            sink(number, _described(key, answer))
        elif (error := plain.error(key, answer)).transient:
            refusal = error
            busy += 1
            sink(number, error)
        elif isinstance(error, NotFound):
            answered += 1
            sink(number, error)
        else:
            odd[number] = error

    failure = await _Run(plain.transport, width, feed, take).run() or refusal
    for number in left:
        assert failure is not None
        sink(number, failure)
    return odd


def _described(key: str, answer: Answer) -> ObjectInfo | StoreError:
    try:
        return described(key, answer.headers)
    except StoreError as error:
        return error


async def get_many(caller: Caller, capabilities: Capabilities, feed: GetFeed, sink: GetSink, width: Width) -> None:
    """See ObjectStore.get_many(). The bucket is not followed, nor are keys renewed: get() does that.

    Errors: StoreError when the server does not answer, CredentialsInvalid.
    """
    plain = await caller.plain("GET")

    def following() -> _Question[ObjectVersion] | None:
        while (wanted := feed()) is not None:
            request = Request(method="GET", expected_bytes=wanted.size, most_bytes=wanted.size)
            try:
                check_key(wanted.key, capabilities)
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

    failure = await _Run(plain.transport, width, following, take).run()
    if failure is not None:
        raise failure
