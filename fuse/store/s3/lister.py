"""Pages of a listing, with the objects' metadata where the server has a word for that.

S3's listing shows no user metadata. MinIO's does when it is asked with `metadata=true` (its ListObjectsV2M), and each
of its answers says that it is MinIO. Nobody else is ever asked so. Only what an entry really shows is believed; one
that shows nothing - who asks may list the object but not read it - is asked about by HEAD, as everywhere.

MinIO checks the rights of who asks for each object then: 80 us of its processor an object, where a plain listing takes
35 and a HEAD 400. So a page that is known is asked for plainly, and with its metadata when it has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from datastore.errors import CorruptBody, StoreError

from ..base import ListPage
from . import xml
from .caller import Call, Caller
from .messages import Answer

_ASK = ("metadata", "true")
_REFUSALS = frozenset({400, 403, 405, 501})


def may_show_metadata(answer: Answer) -> bool:
    """Whether the server that gave this answer is one that can be asked for metadata in listings."""
    return answer.headers.get("server", "").lower().startswith("minio")


class Lister:
    """Lists one bucket. wanted: metadata are of use; shows: the server is known to be one that can show them."""

    def __init__(self, caller: Caller, *, wanted: bool, shows: bool) -> None:
        self._caller = caller
        self._wanted = wanted
        self._refused = False
        self.shows = shows

    def page(
        self, prefix: str, *, delimiter: str, token: str | None, start_after: str, max_keys: int, unless: bytes
    ) -> ListPage:
        """See ObjectStore.list_page."""
        query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(max_keys)), ("prefix", prefix)]
        if delimiter:
            query.append(("delimiter", delimiter))
        if token:
            query.append(("continuation-token", token))
        elif start_after:
            query.append(("start-after", start_after))
        refused = False
        if self._wanted and self.shows:
            if unless and (page := _read(self._send(query), unless)).digest == unless:
                return page
            try:
                return _read(self._send([*query, _ASK]), unless)
            except CorruptBody:
                pass  # MinIO makes XML elements of the names of metadata, also of names that XML can't carry
            except StoreError as error:
                if error.status not in _REFUSALS:
                    raise
                refused = True
        answer = self._send(query)
        self._refused |= refused
        self.shows = not self._refused and (self.shows or may_show_metadata(answer))
        return _read(answer, unless)

    def _send(self, query: Sequence[tuple[str, str]]) -> Answer:
        return self._caller.send(Call(method="GET", query=query, expected_bytes=1 << 20))


def _read(answer: Answer, unless: bytes) -> ListPage:
    body = bytes(answer.body)
    digest = xml.list_digest(body)
    return ListPage((), (), None, digest) if digest == unless else xml.parse_list(body)._replace(digest=digest)
