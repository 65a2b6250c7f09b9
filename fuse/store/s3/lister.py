"""Lists pages of keys, with the objects' metadata where the server can do that.

S3's listing shows no user metadata. MinIO's does when it is asked with `metadata=true` (its ListObjectsV2M), and each
answer of MinIO says that it is MinIO. No other server is asked so. Only what an entry really shows is used; an object
whose entry shows no metadata (the credentials may list but not read it) is asked about by HEAD, as on other servers.

For such a listing MinIO checks access to each object: 80 us of its CPU time an object, where a plain listing takes 35
and a HEAD 400. So a known page is asked for without metadata first, and again with metadata only if it has changed.

In a bucket with versioning MinIO also shows prefixes below which every key was removed. So each prefix is then
checked by a listing without a delimiter, which shows only keys that exist.
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
    """Return what is known of the server that gave this answer, by its Server header.
    versitygw replaces a file by way of a new file whose name has 28 bytes more, and file names have at most 255; its
    new files are in `.sgwtmp`."""
    if _is_minio(answer):
        return replace(before, listed_metadata=True, hides_below_files=True)
    is_versitygw = answer.headers.get("server", "").lower().startswith("versitygw")
    return replace(before, max_new_segment_bytes=227, unlisted_segment=".sgwtmp") if is_versitygw else before


def _query(prefix: str, max_keys: int) -> list[tuple[str, str]]:
    return [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(max_keys)), ("prefix", prefix)]


async def look(caller: Caller, prefix: str) -> tuple[ListPage, Answer]:
    """Return a listing of at most one key, and the answer that contained it."""
    answer = await caller.send(Request(method="GET", query=_query(prefix, 1), most_bytes=xml.most_bytes(1)))
    return xml.parse_list(bytes(answer.body), 1), answer


def _is_minio(answer: Answer) -> bool:
    return answer.headers.get("server", "").lower().startswith("minio")


class Lister:
    """Lists one bucket. wanted: whether to ask for metadata; known: what is known of the server so far."""

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
                pass  # MinIO makes XML elements of names of metadata, even of invalid names
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
        """Whether the bucket has versioning; True if these credentials may not ask for that."""
        if self._versions is None:
            try:
                answer = await self._caller.send(Request(method="GET", query=[("versioning", "")]))
                self._versions = bool(xml.text_of(bytes(answer.body), "Status"))  # Enabled or Suspended
            except AccessDenied:
                self._versions = True
        return self._versions

    async def _without_removed(self, page: ListPage) -> ListPage:
        """Drop prefixes without keys, and the digest: a prefix that loses its last key does not change MinIO's page."""
        there = await each(self._has_keys, page.common_prefixes, _PREFIXES_AT_ONCE)
        prefixes = tuple(prefix for prefix, has_keys in zip(page.common_prefixes, there, strict=True) if has_keys)
        return page._replace(common_prefixes=prefixes, digest=b"")

    async def _has_keys(self, prefix: str) -> bool:
        return bool((await look(self._caller, prefix))[0].objects)
