"""S3 as an ObjectStore: each method is an operation of the Amazon S3 API reference; keys are sent byte for byte.

Nothing is retried. Besides connections, the store keeps only what it has learned about the server, and the checksums of
unfinished uploads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import unquote, urlencode

from datastore.api.source import S3Location
from datastore.errors import CorruptBody, InvalidRequest, NotFound, PreconditionFailed, StoreError, Unsupported

from ..base import (
    PENDING_UPLOADS,
    SYSTEM,
    SYSTEM_HEADERS,
    TAGGED,
    WHOLE_BYTES,
    Body,
    ByteRange,
    Capabilities,
    ETag,
    FilePart,
    ObjectInfo,
    PartNumber,
    PendingUpload,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
    handed_over,
)
from ..limits import check_key, check_metadata, shown
from ..retrying import Retrier, RetryingStore
from . import xml
from .caller import Caller, gather
from .checksums import Checksums, md5_of
from .credentials import CredentialSource
from .errors import Refusal, to_error
from .lister import Lister
from .messages import META, Answer, Outlet, Request, describe, describe_part, http_date_ns, received, written_etag
from .sigv4 import encode_path
from .transport import TransportLimits

_RANGE_NOT_SATISFIABLE = 416
_IGNORED_RANGE_BYTES = 1 << 20
"""A server that ignores Range sends the whole object, which is accepted up to this size or the range's, in bytes."""
_UPLOADS = 1000
"""How many unfinished uploads a server lists on one page."""
_SPACES_BYTES = 1 << 20
"""The largest answer to a long operation; servers send spaces meanwhile, so that the client does not hang up."""


class S3Store:
    """One bucket of an S3 server; implements ObjectStore."""

    def __init__(self, caller: Caller, capabilities: Capabilities, *, list_metadata: bool = False) -> None:
        """list_metadata: listings include metadata if the server can do that, which costs it some time."""
        self._caller = caller
        self._checksums = Checksums(caller.send)
        self._lister = Lister(caller, wanted=list_metadata, known=capabilities)
        self.list_page = self._lister.page

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do, as far as is known by now."""
        return self._lister.known

    async def head(self, key: str) -> ObjectInfo:
        """HeadObject."""
        check_key(key)
        answer = await self._caller.send(Request(method="HEAD", key=key))
        return describe(key, answer.headers)

    async def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """GetObject."""
        check_key(key)
        headers = _matching(if_match)
        expected, most = 0, WHOLE_BYTES
        if byte_range is not None:
            headers["range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"
            expected = byte_range.stop - byte_range.start
            most = max(expected, _IGNORED_RANGE_BYTES)
        info: ObjectInfo | None = None
        outlet = None
        if sink is not None:

            def pour(headers: Mapping[str, str], length: int, offset: int, body: Body) -> None:
                nonlocal info
                if info is None:
                    info = describe_part(key, headers, length, byte_range)
                sink(info, offset, body)

            outlet = Outlet(200, 0, pour) if byte_range is None else Outlet(206, byte_range.start, pour)
        request = Request(
            method="GET", key=key, headers=headers, expected_bytes=expected, outlet=outlet, most_bytes=most
        )
        try:
            answer = await self._caller.send(request)
        except StoreError as error:
            if error.status != _RANGE_NOT_SATISFIABLE or byte_range is None:
                raise
            return b"", await self._past_end(key, byte_range, if_match)
        if info is not None:
            return b"", info
        return handed_over(received(key, answer, byte_range), sink)

    async def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """PutObject. With a condition it is not repeatable: a second request would meet the object of the first."""
        check_key(key)
        check_metadata(key, options.metadata)
        headers = {**_described(options), **await self._tags(key, options), **_conditions(options)}
        conditional = options.if_none_match or options.if_match is not None
        request = Request(method="PUT", key=key, headers=headers, body=body, repeatable=not conditional)
        answer = await self._checksums.put(request)
        return WriteResult(written_etag(request, answer), _date_ns(answer))

    async def copy(
        self,
        source: str,
        target: str,
        *,
        replace: WriteOptions | None = None,
        if_source_match: ETag | None = None,
        source_bucket: str = "",
    ) -> WriteResult:
        """CopyObject."""
        check_key(target)
        check_key(source)
        own = source_bucket in ("", self._caller.endpoint.bucket)
        if own and source == target and replace is None:
            raise InvalidRequest(f"{shown(target)}: a copy onto itself must change something", key=target)
        if replace is not None:
            check_metadata(target, replace.metadata)
        if own and source.endswith("/") and source != target:
            copied = await self._copy_marker(source, target, replace, if_source_match)
            if copied is not None:
                return copied
        headers = self._source(source, if_source_match, source_bucket)
        if replace is not None:
            headers |= {**_described(replace), "x-amz-metadata-directive": "REPLACE"}
        request = Request(method="PUT", key=target, headers=headers, is_long=True, most_bytes=_SPACES_BYTES)
        answer = await self._caller.send(request)
        etag, mtime_ns = xml.parse_copy(bytes(answer.body))
        return WriteResult(etag, mtime_ns or _date_ns(answer))

    async def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """DeleteObject."""
        check_key(key)
        with suppress(NotFound):
            await self._caller.send(Request(method="DELETE", key=key, headers=_matching(if_match)))

    async def delete_many(self, keys: Sequence[str]) -> list[StoreError]:
        """DeleteObjects; keys that XML can't carry are deleted one by one."""
        plain = [key for key in keys if xml.fits_xml(key)]
        failures: list[StoreError] = []
        if plain:
            answer = await self._send_xml("POST", xml.build_delete(plain), query="delete", entries=len(plain))
            refused = xml.parse_delete(bytes(answer.body), len(plain))
            told = [
                to_error(Refusal(method="DELETE", key=key, status=answer.status, code=code, message=message))
                for key, code, message in refused
            ]
            failures = [error for error in told if not isinstance(error, NotFound)]
            for error in failures:
                if error.transient:
                    raise error
        for key in keys:
            if not xml.fits_xml(key):
                try:
                    await self.delete(key)
                except StoreError as error:
                    if error.transient:
                        raise
                    failures.append(error)
        return failures

    async def create_upload(self, key: str, options: WriteOptions, *, copies: bool = False) -> UploadId:
        """CreateMultipartUpload. With `copies` it declares no checksums: copied parts have none (s3/checksums.py)."""
        check_key(key)
        check_metadata(key, options.metadata)
        headers = {**_described(options), **await self._tags(key, options)}
        request = Request(method="POST", key=key, query=[("uploads", "")], headers=headers, repeatable=False)
        if copies:
            return self._checksums.mixed(xml.parse_upload_id(bytes((await self._caller.send(request)).body)))
        return await self._checksums.begin(request, partial(self.abort_upload, key))

    async def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """UploadPart."""
        request = Request(method="PUT", key=key, query=_part(upload_id, number), body=body)
        return await self._checksums.part(request, upload_id, number)

    async def upload_part_copy(
        self,
        key: str,
        upload_id: UploadId,
        number: PartNumber,
        source: str,
        byte_range: ByteRange,
        if_source_match: ETag | None,
        *,
        source_bucket: str = "",
    ) -> ETag:
        """UploadPartCopy."""
        headers = self._source(source, if_source_match, source_bucket)
        headers["x-amz-copy-source-range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"
        request = Request(
            method="PUT",
            key=key,
            query=_part(upload_id, number),
            headers=headers,
            is_long=True,
            most_bytes=_SPACES_BYTES,
        )
        return xml.parse_copy(bytes((await self._caller.send(request)).body))[0]

    async def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """CompleteMultipartUpload."""
        request = Request(
            method="POST",
            key=key,
            query=[("uploadId", upload_id)],
            headers={**_conditions(options), "content-type": "application/xml"},
            body=xml.build_complete(parts, self._checksums.of(upload_id, parts)),
            repeatable=False,
            is_long=True,
            most_bytes=_SPACES_BYTES,
        )
        answer = await self._checksums.complete(request, upload_id)
        etag, mtime_ns = xml.parse_copy(bytes(answer.body))
        return WriteResult(etag, mtime_ns or _date_ns(answer))

    async def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """AbortMultipartUpload."""
        self._checksums.forget(upload_id)
        with suppress(NotFound):
            await self._caller.send(Request(method="DELETE", key=key, query=[("uploadId", upload_id)]))

    async def pending_uploads(self, prefix: str) -> list[PendingUpload]:
        """ListMultipartUploads. MinIO's prefix must be a whole key: if none is found, all uploads are filtered here."""
        found = await self._uploads(prefix) if prefix else []
        return found or [upload for upload in await self._uploads("") if upload.key.startswith(prefix)]

    async def has_object_lock(self) -> bool:
        """GetObjectLockConfiguration."""
        try:
            answer = await self._caller.send(Request(method="GET", query=[("object-lock", "")]))
        except Unsupported:
            return False
        return xml.text_of(bytes(answer.body), "ObjectLockEnabled") == "Enabled"

    async def set_legal_hold(self, key: str, *, on: bool) -> None:
        """PutObjectLegalHold."""
        check_key(key)
        await self._send_xml("PUT", xml.build_legal_hold(on=on), key=key, query="legal-hold")

    def close(self) -> None:
        self._caller.close()

    async def _send_xml(self, method: str, body: bytes, *, query: str, key: str = "", entries: int = 0) -> Answer:
        """Send an XML body. entries: for how many objects the answer may have an entry."""
        headers = {"content-md5": md5_of(body), "content-type": "application/xml"}
        most_bytes = xml.most_bytes(entries)
        return await self._caller.send(
            Request(method=method, key=key, query=[(query, "")], headers=headers, body=body, most_bytes=most_bytes)
        )

    async def _uploads(self, prefix: str) -> list[PendingUpload]:
        markers: list[tuple[str, str]] = []
        found: list[PendingUpload] = []
        for _ in range(PENDING_UPLOADS // _UPLOADS):
            query = [("uploads", ""), ("encoding-type", "url"), ("prefix", prefix), *markers]
            most_bytes = xml.most_bytes(_UPLOADS)
            request = Request(method="GET", query=query, expected_bytes=1 << 20, most_bytes=most_bytes)
            answer = await self._caller.send(request)
            uploads, markers = xml.parse_uploads(bytes(answer.body), _UPLOADS)
            found += uploads
            if not markers:
                break
        return found

    async def _past_end(self, key: str, byte_range: ByteRange, if_match: ETag | None) -> ObjectInfo:
        """Return the facts of an object that ends before the range. Errors: CorruptBody, transient, if it has grown."""
        info = await self.head(key)
        if if_match is not None and info.etag != if_match:
            raise PreconditionFailed(f"GET {shown(key)}: the object is another version", key=key, status=412)
        if info.size > byte_range.start:
            raise CorruptBody(f"GET {shown(key)}: the object changed while it was read", key=key)
        return info

    def _source(self, source: str, if_match: ETag | None, bucket: str) -> dict[str, str]:
        where = encode_path(bucket or self._caller.endpoint.bucket)
        matching = _matching(if_match, "x-amz-copy-source-if-match")
        return {"x-amz-copy-source": f"{where}/{encode_path(source)}", **matching}

    async def _tags(self, key: str, options: WriteOptions) -> dict[str, str]:
        """Return the header that gives an object the tags of the one in whose place it is written."""
        if TAGGED not in options.metadata:
            return {}
        # After a rename the tags are at the new key; they are at the old key until an upload has made the new one.
        for place in dict.fromkeys((unquote(options.metadata[TAGGED], errors="surrogateescape"), key)):
            with suppress(NotFound):
                answer = await self._caller.send(Request(method="GET", key=place, query=[("tagging", "")]))
                tags = xml.parse_tags(bytes(answer.body))
                if tags:
                    return {"x-amz-tagging": urlencode(tags)}
        return {}

    async def _copy_marker(
        self, source: str, target: str, replace: WriteOptions | None, if_match: ETag | None
    ) -> WriteResult | None:
        """Make an empty directory object again, since versitygw refuses to copy it; None when the source has a body."""
        info = await self.head(source)
        if if_match is not None and info.etag != if_match:
            raise PreconditionFailed(f"PUT {shown(target)}: {shown(source)} is another version", key=source, status=412)
        if info.size:
            return None
        kept = replace or WriteOptions(metadata=info.metadata, content_type=info.content_type)
        return await self.put(target, b"", WriteOptions(metadata=kept.metadata, content_type=kept.content_type))


def open_s3(
    location: S3Location,
    *,
    capabilities: Capabilities | None = None,
    retrier: Retrier | None = None,
    limits: TransportLimits | None = None,
    keys: CredentialSource | None = None,
    list_metadata: bool = False,
) -> RetryingStore:
    """Return a store to work with: the adapter behind retries and metrics.

    capabilities: from probe(); else conservative ones. keys: used instead of the credentials that the location names.
    list_metadata: listings include the objects' metadata if the server can do that.
    No request is sent; probe() tells whether the location is right. Errors: InvalidRequest, CredentialsInvalid.
    """
    caller = gather(location, limits or TransportLimits(), keys)
    adapter = S3Store(caller, capabilities or Capabilities(), list_metadata=list_metadata)
    return RetryingStore(adapter, retrier)


def _described(options: WriteOptions) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in options.metadata.items():
        if not name.startswith(SYSTEM):
            headers[META + name] = value
        elif name[1:] in SYSTEM_HEADERS:
            headers[name[1:]] = value
    if options.content_type:
        headers["content-type"] = options.content_type
    if options.legal_hold:
        headers["x-amz-object-lock-legal-hold"] = "ON"
    return headers


def _conditions(options: WriteOptions) -> dict[str, str]:
    return {"if-none-match": "*"} if options.if_none_match else _matching(options.if_match)


def _part(upload_id: UploadId, number: PartNumber) -> list[tuple[str, str]]:
    return [("partNumber", str(number)), ("uploadId", upload_id)]


def _matching(etag: ETag | None, name: str = "if-match") -> dict[str, str]:
    return {} if etag is None else {name: f'"{etag}"'}


def _date_ns(answer: Answer) -> int:
    return http_date_ns(answer.headers.get("date", ""))
