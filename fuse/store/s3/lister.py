"""Pages of a listing, with the objects' metadata where the server has a word for that.

S3's listing shows no user metadata. MinIO's does when it is asked with `metadata=true` (its ListObjectsV2M), and each
of its answers says that it is MinIO. Nobody else is ever asked so. Only what an entry really shows is believed; one
that shows nothing - who asks may list the object but not read it - is asked about by HEAD, as everywhere.

MinIO checks the rights of who asks for each object then: 80 us of its processor an object, where a plain listing takes
35 and a HEAD 400. So a page that is known is asked for plainly, and with its metadata when it has changed.

Of a bucket with versioning MinIO also shows prefixes below which every key was removed. Whether one has keys is then
asked for each: a listing without a delimiter is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from datastore.errors import AccessDenied, CorruptBody, StoreError

from ...loop import each
from ..base import Capabilities, ListPage
from . import xml
from .caller import Caller
from .messages import Answer, Request

_ASK = ("metadata", "true")
_PREFIXES_AT_ONCE = 16
_REFUSALS = frozenset({400, 403, 405, 501})


def known_by(answer: Answer, before: Capabilities) -> Capabilities:
    """What is known of the server that gave this answer, which says what it is.

    versitygw replaces a file by way of a new one whose name has 28 bytes more, and a disk takes 255.
    """
    if _is_minio(answer):
        return replace(before, listed_metadata=True, hides_below_files=True)
    is_versitygw = answer.headers.get("server", "").lower().startswith("versitygw")
    return replace(before, max_new_segment_bytes=227) if is_versitygw else before


def _query(prefix: str, max_keys: int) -> list[tuple[str, str]]:
    return [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(max_keys)), ("prefix", prefix)]


async def look(caller: Caller, prefix: str) -> tuple[ListPage, Answer]:
    """A listing of one key."""
    answer = await caller.send(Request(method="GET", query=_query(prefix, 1), most_bytes=xml.most_bytes(1)))
    return xml.parse_list(bytes(answer.body), 1), answer


def _is_minio(answer: Answer) -> bool:
    return answer.headers.get("server", "").lower().startswith("minio")


class Lister:
    """Lists one bucket. wanted: metadata are of use; known: of the server, by now."""

    def __init__(self, caller: Caller, *, wanted: bool, known: Capabilities) -> None:
        self._caller = caller
        self._wanted = wanted
        self._refused = False
        self.known = known
        self._versions: bool | None = None

    async def page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        max_keys: int = 1000,
        unless: bytes = b"",
    ) -> ListPage:
        """See ObjectStore.list_page."""
        query = _query(prefix, max_keys)
        if delimiter:
            query.append(("delimiter", delimiter))
        if token:
            query.append(("continuation-token", token))
        elif start_after:
            query.append(("start-after", start_after))
        if self._wanted and self.known.listed_metadata:
            if unless and (page := await self._asked(query, max_keys, unless)).digest == unless:
                return page
            try:
                return await self._asked([*query, _ASK], max_keys, unless, metadata=True)
            except CorruptBody:
                pass  # MinIO makes XML elements of the names of metadata, also of names that XML can't carry
            except StoreError as error:
                if error.status not in _REFUSALS:
                    raise
                self._refused = True
        return await self._asked(query, max_keys, unless)

    async def _asked(
        self, query: Sequence[tuple[str, str]], keys: int, unless: bytes, *, metadata: bool = False
    ) -> ListPage:
        most_bytes = xml.most_bytes(keys, metadata=metadata)
        request = Request(method="GET", query=query, expected_bytes=1 << 20, most_bytes=most_bytes)
        answer = await self._caller.send(request)
        known = known_by(answer, self.known)
        self.known = replace(known, listed_metadata=known.listed_metadata and not self._refused)
        body = bytes(answer.body)
        digest = xml.list_digest(body)
        if digest == unless:
            return ListPage((), (), None, digest)
        page = xml.parse_list(body, keys, metadata=metadata)._replace(digest=digest)
        removed = bool(page.common_prefixes) and _is_minio(answer) and await self._shows_removed_prefixes()
        return await self._without_removed(page) if removed else page

    async def _shows_removed_prefixes(self) -> bool:
        """Where these keys may not ask whether the bucket has versioning, it is taken to have it."""
        if self._versions is None:
            try:
                answer = await self._caller.send(Request(method="GET", query=[("versioning", "")]))
                self._versions = bool(xml.text_of(bytes(answer.body), "Status"))  # also of one that kept versions once
            except AccessDenied:
                self._versions = True
        return self._versions

    async def _without_removed(self, page: ListPage) -> ListPage:
        """The page is the same before and after the last key below a prefix is removed, so it has no digest."""
        there = await each(self._has_keys, page.common_prefixes, _PREFIXES_AT_ONCE)
        prefixes = tuple(prefix for prefix, has_keys in zip(page.common_prefixes, there, strict=True) if has_keys)
        return page._replace(common_prefixes=prefixes, digest=b"")

    async def _has_keys(self, prefix: str) -> bool:
        return bool((await look(self._caller, prefix))[0].objects)
