"""HeadObject of many keys at once (s3/fanout.py); what is no plain answer goes the way of a single one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from datastore.errors import NotFound, StoreError

from ..base import Capabilities, HeadSink, ObjectInfo, Shown
from ..limits import check_head_count, check_key
from .answers import described
from .caller import Caller
from .fanout import Question
from .messages import Answer, Request

_ROUNDS = 3
"""The bucket turned out to be elsewhere, or the credentials were renewed: so often all is asked again together."""
_BUSY = 8
"""So many refusals more than answers: the server is asked for no more before the next try."""


class Heads:
    """Of one bucket. head: of one key, which follows the bucket and renews credentials. Threads: any."""

    def __init__(self, caller: Caller, head: Callable[[str], ObjectInfo]) -> None:
        self._caller = caller
        self._head = head

    def ask(self, objects: Sequence[Shown], capabilities: Capabilities, sink: HeadSink) -> None:
        """See ObjectStore.head_many()."""
        check_head_count(objects)
        left: list[int] = []
        for number, shown in enumerate(objects):
            try:
                check_key(shown.key, capabilities)
            except StoreError as error:
                sink(number, error)
            else:
                left.append(number)
        for _ in range(_ROUNDS):
            if not left:
                return
            left = self._round(objects, left, sink)
        for number in left:
            self._alone(objects, number, sink)

    def _round(self, objects: Sequence[Shown], numbers: list[int], sink: HeadSink) -> list[int]:
        """Ask for all; those that have to be asked for again, since the caller has learned how."""
        round_ = _Round(self._caller, objects, sink)
        round_.run(numbers)
        if not round_.odd:
            return []
        first, *rest = round_.odd
        self._alone(objects, first, sink)
        if round_.is_outdated():
            return rest
        for number in rest:
            sink(number, round_.odd[number])
        return []

    def _alone(self, objects: Sequence[Shown], number: int, sink: HeadSink) -> None:
        try:
            answer: ObjectInfo | StoreError = self._head(objects[number].key)
        except StoreError as error:
            answer = error
        sink(number, answer)


class _Round:
    """The questions to one endpoint, signed with the same keys. odd: refusals that the caller may know a way around."""

    def __init__(self, caller: Caller, objects: Sequence[Shown], sink: HeadSink) -> None:
        self._caller = caller
        self._objects = objects
        self._sink = sink
        self._endpoint, self._transport = caller.place
        self._keys = caller.credentials.keys()
        self._answered = 0
        self._refused: Answer | None = None
        self._busy = 0
        self.odd: dict[int, StoreError] = {}

    def run(self, numbers: list[int]) -> None:
        """Ask for all."""
        left = deque(numbers)

        def feed() -> Question | None:
            if not left or self._busy > self._answered + _BUSY:
                return None
            key = self._objects[left[0]].key
            target, headers = self._caller.bodyless("HEAD", key, self._keys, self._endpoint, {})
            return Question(left.popleft(), self._transport.connections.head("HEAD", target, headers))

        failure = self._transport.fan_out.ask(feed, self._take)
        for number in left:
            if failure is not None:
                self._sink(number, failure)
            elif self._refused is not None:
                self._sink(number, self._error(number, self._refused))

    def is_outdated(self) -> bool:
        """Whether the bucket, or the keys, are others by now."""
        return self._caller.place != (self._endpoint, self._transport) or self._caller.credentials.keys() != self._keys

    def _take(self, number: int, answer: Answer | StoreError | None) -> None:
        if isinstance(answer, StoreError):
            self._sink(number, answer)
            return
        assert answer is not None  # a HEAD has no body
        self._caller.compare_clocks(answer)
        if answer.status < 300:
            self._answered += 1
            try:
                found: ObjectInfo | StoreError = described(self._objects[number].key, answer.headers)
            except StoreError as odd:
                found = odd
            self._sink(number, found)
            return
        error = self._error(number, answer)
        if not isinstance(error, NotFound) and not error.transient:
            self.odd[number] = error
            return
        self._sink(number, error)
        if error.transient:
            self._refused = answer
            self._busy += 1
        else:
            self._answered += 1

    def _error(self, number: int, answer: Answer) -> StoreError:
        return self._caller.error(Request(method="HEAD", key=self._objects[number].key), answer, self._keys)
