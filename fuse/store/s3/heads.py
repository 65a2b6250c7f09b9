"""HeadObject of many keys at once (s3/fanout.py); what is no plain answer goes the way of a single one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from datastore.errors import NotFound, StoreError

from ..base import Capabilities, HeadSink, ObjectInfo, Shown
from ..limits import check_head_count, check_key
from .answers import described
from .caller import Caller
from .endpoint import Endpoint
from .fanout import Question
from .messages import Answer, Request
from .sigv4 import SigningKeys
from .transport import Transport

_ROUNDS = 3
"""The bucket turned out to be elsewhere, or the credentials were renewed: so often all is asked again together."""
_BUSY = 8
"""So many refusals more than answers: the server is asked for no more before the next try."""


def head_many(
    caller: Caller,
    capabilities: Capabilities,
    head: Callable[[str], ObjectInfo],
    objects: Sequence[Shown],
    sink: HeadSink,
) -> None:
    """See ObjectStore.head_many(). head: of one key, which follows the bucket and renews credentials."""
    check_head_count(objects)
    left: list[int] = []
    for number, shown in enumerate(objects):
        try:
            check_key(shown.key, capabilities)
        except StoreError as error:
            sink(number, error)
        else:
            left.append(number)

    def alone(number: int) -> None:
        try:
            answer: ObjectInfo | StoreError = head(objects[number].key)
        except StoreError as error:
            answer = error
        sink(number, answer)

    for _ in range(_ROUNDS):
        place, keys = caller.place, caller.credentials.keys()
        odd = _round(caller, place, keys, objects, left, sink)
        if not odd:
            return
        first, *left = odd
        alone(first)
        if caller.place == place and caller.credentials.keys() == keys:  # there is no other way to ask
            for number in left:
                sink(number, odd[number])
            return
    for number in left:
        alone(number)


def _round(
    caller: Caller,
    place: tuple[Endpoint, Transport],
    keys: SigningKeys,
    objects: Sequence[Shown],
    numbers: list[int],
    sink: HeadSink,
) -> dict[int, StoreError]:
    """Ask one endpoint for all, signed with the same keys; the refusals that the caller may know a way around."""
    endpoint, transport = place
    left, odd = deque(numbers), dict[int, StoreError]()
    refused: Answer | None = None
    answered = busy = 0

    def refusal(number: int, answer: Answer) -> StoreError:
        return caller.error(Request(method="HEAD", key=objects[number].key), answer, keys)

    def feed() -> Question | None:
        if not left or busy > answered + _BUSY:
            return None
        target, headers = caller.bodyless("HEAD", objects[left[0]].key, keys, endpoint, {})
        return Question(left.popleft(), transport.connections.head("HEAD", target, headers))

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

    failure = transport.fan_out.ask(feed, take)
    for number in left:
        if failure is not None:
            sink(number, failure)
        elif refused is not None:
            sink(number, refusal(number, refused))
    return odd
