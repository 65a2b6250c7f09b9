"""GetObject of many small objects by one thread (s3/fanout.py)."""

from __future__ import annotations

from contextlib import suppress

from datastore.errors import StoreError

from ...loop import Loop
from ..base import Body, Capabilities, GetFeed, GetSink, ObjectInfo, ObjectVersion
from ..limits import check_key
from .answers import describe
from .caller import Caller
from .fanout import Question
from .messages import Answer


def get_many(
    caller: Caller, capabilities: Capabilities, feed: GetFeed, sink: GetSink, loop: Loop | None = None
) -> None:
    """See ObjectStore.get_many(). The bucket is not followed, nor are keys renewed: get() does that.

    Errors: StoreError when the server does not answer, CredentialsInvalid.
    """
    endpoint, transport = caller.place
    keys = caller.credentials.keys()
    asked: dict[int, ObjectVersion] = {}
    number = 0

    def following() -> Question | None:
        nonlocal number
        while (wanted := feed()) is not None:
            with suppress(StoreError):
                check_key(wanted.key, capabilities)
                match = {"if-match": f'"{wanted.etag}"'}
                target, headers = caller.bodyless("GET", wanted.key, keys, endpoint, match)
                head = transport.connections.head("GET", target, headers)
                number += 1
                asked[number] = wanted
                return Question(number, head, wanted.size)
            sink(wanted, None)
        return None

    def take(number: int, answer: Answer | StoreError | None) -> None:
        wanted = asked.pop(number)
        sink(wanted, _told(wanted, answer) if isinstance(answer, Answer) else None)

    failure = transport.fan_out.ask(following, take, loop)
    if failure is not None:
        raise failure


def _told(wanted: ObjectVersion, answer: Answer) -> tuple[Body, ObjectInfo] | None:
    info = describe(wanted.key, answer.headers, wanted.size)
    return None if info.etag and info.etag != wanted.etag else (answer.body, info)
