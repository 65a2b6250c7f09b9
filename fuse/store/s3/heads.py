"""HeadObject of many keys at once (s3/fanout.py); what is no plain answer goes the way of a single one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from datastore.errors import NotFound, StoreError

from ...loop import Loop
from ..base import Capabilities, HeadSink, ObjectInfo, Shown, by
from ..limits import check_head_count, check_key
from .answers import described
from .caller import Bodyless, Caller
from .fanout import Question
from .messages import Answer, Request

_ROUNDS = 3
"""The bucket turned out to be elsewhere, or the credentials were renewed: so often all is asked again together."""
_BUSY = 8
"""So many refusals more than answers: the server is asked for no more before the next try."""

Told = list[tuple[int, ObjectInfo | StoreError]]


def head_many(
    caller: Caller,
    capabilities: Capabilities,
    head: Callable[[str], ObjectInfo],
    objects: Sequence[Shown],
    sink: HeadSink,
    loop: Loop | None = None,
) -> None:
    """See ObjectStore.head_many(). head: of one key, which follows the bucket and renews credentials."""
    check_head_count(objects)
    left: list[int] = []
    told: Told = []  # what this thread finds out, for the sink at the end
    for number, shown in enumerate(objects):
        try:
            check_key(shown.key, capabilities)
        except StoreError as error:
            told.append((number, error))
        else:
            left.append(number)

    def alone(number: int) -> None:
        try:
            told.append((number, head(objects[number].key)))
        except StoreError as error:
            told.append((number, error))

    for _ in range(_ROUNDS):
        asking = caller.bodyless("HEAD")
        odd = _round(caller, asking, objects, left, told, sink, loop)
        if not odd:
            break
        first, *left = odd
        alone(first)
        if not caller.is_changed(asking):  # there is no other way to ask
            told += [(number, odd[number]) for number in left]
            break
    else:
        for number in left:
            alone(number)

    def tell() -> None:
        for number, answer in told:
            sink(number, answer)

    if told:
        by(loop, tell)


def _round(
    caller: Caller,
    asking: Bodyless,
    objects: Sequence[Shown],
    numbers: list[int],
    told: Told,
    sink: HeadSink,
    loop: Loop | None,
) -> dict[int, StoreError]:
    """Ask one endpoint for all, signed with the same keys; the refusals that the caller may know a way around."""
    left, odd = deque(numbers), dict[int, StoreError]()
    refused: Answer | None = None
    answered = busy = 0

    def refusal(number: int, answer: Answer) -> StoreError:
        return caller.error(Request(method="HEAD", key=objects[number].key), answer, asking.keys)

    def feed() -> Question[int] | None:
        if not left or busy > answered + _BUSY:
            return None
        head = asking.head(objects[left[0]].key)  # of what that raises for, this thread tells
        return Question(left.popleft(), head)

    def take(number: int, answer: Answer | StoreError | None) -> None:
        nonlocal refused, answered, busy
        if isinstance(answer, StoreError):
            sink(number, answer)
            return
        assert answer is not None  # a HEAD has no body
        caller.compare_clocks(answer)
        if answer.status < 300:
            answered += 1
            try:
                found: ObjectInfo | StoreError = described(objects[number].key, answer.headers)
            except StoreError as unreadable:
                found = unreadable
            sink(number, found)
            return
        error = refusal(number, answer)
        if error.transient:
            refused = answer
            busy += 1
        elif isinstance(error, NotFound):
            answered += 1
        else:
            odd[number] = error
            return
        sink(number, error)

    failure = asking.transport.fan_out.ask(feed, take, loop)
    for number in left:
        if failure is not None:
            told.append((number, failure))
        elif refused is not None:
            told.append((number, refusal(number, refused)))
    return odd
