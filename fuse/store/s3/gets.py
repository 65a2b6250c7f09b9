"""GetObject of many small objects by one thread (s3/fanout.py)."""

from __future__ import annotations

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
    asking = caller.bodyless("GET")

    def following() -> Question[ObjectVersion] | None:
        while (wanted := feed()) is not None:
            try:
                check_key(wanted.key, capabilities)
                return Question(wanted, asking.head(wanted.key, wanted.etag), wanted.size)
            except StoreError:
                sink(wanted, None)
        return None

    def take(wanted: ObjectVersion, answer: Answer | StoreError | None) -> None:
        told: tuple[Body, ObjectInfo] | None = None
        if isinstance(answer, Answer):
            info = describe(wanted.key, answer.headers, wanted.size)
            if not info.etag or info.etag == wanted.etag:
                told = answer.body, info
        sink(wanted, told)

    failure = asking.transport.fan_out.ask(following, take, loop)
    if failure is not None:
        raise failure
