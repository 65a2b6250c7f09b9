"""The exact-key client: every call of ObjectStore as one signed request, keys sent byte for byte as they are.

No retries, no state but the connections. Source: Amazon S3 API reference, one operation per method.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from datastore.errors import CorruptBody, InvalidRequest, NotFound, PreconditionFailed, StoreError

from ..base import (
    Body,
    ByteRange,
    Capabilities,
    DeleteFailure,
    ETag,
    FilePart,
    ListPage,
    ObjectInfo,
    PartNumber,
    PendingUpload,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
    handed_over,
)
from ..limits import check_delete_count, check_key, check_metadata, check_options, check_part_number, shown
from . import xml
from .caller import Call, Caller
from .sigv4 import encode_path
from .transport import Answer, Outlet

_META = "x-amz-meta-"
_LONG_S = 300.0
"""A server copies 5 GiB, or joins 10,000 parts, before it answers: at 20 MB/s that is 250 s."""
_RANGE_NOT_SATISFIABLE = 416


class ExactClient:
    """One bucket of an S3 server; implements ObjectStore."""

    def __init__(self, caller: Caller, capabilities: Capabilities) -> None:
        self._caller = caller
        self._capabilities = capabilities

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do."""
        return self._capabilities

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        max_keys: int = 1000,
        unless: bytes = b"",
    ) -> ListPage:
        """ListObjectsV2."""
        query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(max_keys)), ("prefix", prefix)]
        if delimiter:
            query.append(("delimiter", delimiter))
        if token:
            query.append(("continuation-token", token))
        elif start_after:
            query.append(("start-after", start_after))
        answer = self._caller.send(Call(method="GET", query=query, expected_bytes=1 << 20))
        body = bytes(answer.body)
        digest = xml.list_digest(body)
        return ListPage((), (), None, digest) if digest == unless else xml.parse_list(body)._replace(digest=digest)

    def head(self, key: str) -> ObjectInfo:
        """HeadObject."""
        check_key(key, self._capabilities)
        answer = self._caller.send(Call(method="HEAD", key=key))
        return _describe(key, answer.headers, int(answer.headers.get("content-length", "0")))

    def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """GetObject."""
        check_key(key, self._capabilities)
        headers: dict[str, str] = {}
        expected = 0
        if byte_range is not None:
            headers["range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"
            expected = byte_range.stop - byte_range.start
        if if_match is not None:
            headers["if-match"] = _quoted(if_match)
        pouring = None if sink is None else Pouring(key, byte_range, sink)
        outlet = None if pouring is None else pouring.outlet()
        call = Call(method="GET", key=key, headers=headers, expected_bytes=expected, outlet=outlet)
        try:
            answer = self._caller.send(call)
        except StoreError as error:
            if error.status != _RANGE_NOT_SATISFIABLE or byte_range is None:
                raise
            return b"", self._past_end(key, byte_range, if_match)
        if pouring is not None and answer.poured:
            return b"", pouring.info(answer.headers, answer.poured)
        return handed_over(_received(key, answer, byte_range), sink)

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """PutObject. With a condition it is not repeatable: the second attempt would meet the first one's object."""
        check_key(key, self._capabilities)
        check_options(key, options)
        headers = {**_described(options), **_conditions(options)}
        conditional = options.if_none_match or options.if_match is not None
        call = Call(method="PUT", key=key, headers=headers, body=body, repeatable=not conditional)
        answer = self._conditional(call, options)
        return WriteResult(xml.unquote_etag(answer.headers.get("etag", "")), _date_ns(answer))

    def copy(
        self, source: str, target: str, *, replace: WriteOptions | None = None, if_source_match: ETag | None = None
    ) -> WriteResult:
        """CopyObject."""
        check_key(target, self._capabilities)
        check_key(source, self._capabilities)
        if source == target and replace is None:
            raise InvalidRequest(f"{shown(target)}: a copy onto itself must change something", key=target)
        if replace is not None:
            check_metadata(target, replace.metadata)
        if source.endswith("/") and source != target:
            copied = self._copy_marker(source, target, replace, if_source_match)
            if copied is not None:
                return copied
        headers = self._source(source, if_source_match)
        if replace is not None:
            headers |= {**_described(replace), "x-amz-metadata-directive": "REPLACE"}
        call = Call(method="PUT", key=target, headers=headers, patience_s=_LONG_S)
        answer = self._long(call)
        etag, mtime_ns = xml.parse_copy(bytes(answer.body))
        return WriteResult(etag, mtime_ns or _date_ns(answer))

    def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """DeleteObject."""
        check_key(key, self._capabilities)
        headers = {"if-match": _quoted(if_match)} if if_match is not None else {}
        try:
            self._caller.send(Call(method="DELETE", key=key, headers=headers))
        except NotFound:
            return

    def delete_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """DeleteObjects; keys that XML can't carry are deleted one by one."""
        check_delete_count(keys)
        plain = [key for key in keys if xml.fits_xml(key)]
        failures: list[DeleteFailure] = []
        if plain:
            body = xml.build_delete(plain)
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            headers = {"content-md5": digest, "content-type": "application/xml"}
            answer = self._caller.send(Call(method="POST", query=[("delete", "")], headers=headers, body=body))
            failures = [failure for failure in xml.parse_delete(bytes(answer.body)) if failure.code != "NoSuchKey"]
        for key in keys:
            if not xml.fits_xml(key):
                failures += self._delete_one(key)
        return failures

    def create_upload(self, key: str, options: WriteOptions) -> UploadId:
        """CreateMultipartUpload."""
        check_key(key, self._capabilities)
        check_options(key, options)
        call = Call(method="POST", key=key, query=[("uploads", "")], headers=_described(options), repeatable=False)
        return xml.parse_upload_id(bytes(self._caller.send(call).body))

    def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """UploadPart."""
        check_part_number(key, number)
        answer = self._caller.send(Call(method="PUT", key=key, query=_part(upload_id, number), body=body))
        return xml.unquote_etag(answer.headers.get("etag", ""))

    def upload_part_copy(
        self,
        key: str,
        upload_id: UploadId,
        number: PartNumber,
        source: str,
        byte_range: ByteRange,
        if_source_match: ETag | None,
    ) -> ETag:
        """UploadPartCopy."""
        check_part_number(key, number)
        headers = self._source(source, if_source_match)
        headers["x-amz-copy-source-range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"
        call = Call(method="PUT", key=key, query=_part(upload_id, number), headers=headers, patience_s=_LONG_S)
        return xml.parse_copy(bytes(self._long(call).body))[0]

    def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """CompleteMultipartUpload."""
        check_options(key, options)
        call = Call(
            method="POST",
            key=key,
            query=[("uploadId", upload_id)],
            headers={**_conditions(options), "content-type": "application/xml"},
            body=xml.build_complete(parts),
            repeatable=False,
            patience_s=_LONG_S,
        )
        answer = self._conditional(call, options)
        etag, mtime_ns = xml.parse_copy(bytes(answer.body))
        return WriteResult(etag, mtime_ns or _date_ns(answer))

    def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """AbortMultipartUpload."""
        try:
            self._caller.send(Call(method="DELETE", key=key, query=[("uploadId", upload_id)]))
        except NotFound:
            return

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """ListMultipartUploads. MinIO takes a prefix only when it is a whole key: nothing found, all are sifted."""
        found = list(self._uploads(prefix)) if prefix else []
        return iter(found or [upload for upload in self._uploads("") if upload.key.startswith(prefix)])

    def close(self) -> None:
        """Close connections; idempotent."""
        self._caller.close()

    def _uploads(self, prefix: str) -> Iterator[PendingUpload]:
        markers: list[tuple[str, str]] = []
        while True:
            query = [("uploads", ""), ("encoding-type", "url"), ("prefix", prefix), *markers]
            answer = self._caller.send(Call(method="GET", query=query, expected_bytes=1 << 20))
            page = xml.parse_uploads(bytes(answer.body))
            yield from page.uploads
            if not page.next_key:
                return
            markers = [("key-marker", page.next_key), ("upload-id-marker", page.next_upload_id)]

    def _past_end(self, key: str, byte_range: ByteRange, if_match: ETag | None) -> ObjectInfo:
        """The object whose end a range missed; a change in between is a transient fault, and asked again."""
        info = self.head(key)
        if if_match is not None and info.etag != if_match:
            raise PreconditionFailed(f"GET {shown(key)}: the object is another version", key=key, status=412)
        if info.size > byte_range.start:
            raise CorruptBody(f"GET {shown(key)}: the object changed while it was read", key=key)
        return info

    def _source(self, source: str, if_match: ETag | None) -> dict[str, str]:
        headers = {"x-amz-copy-source": f"{encode_path(self._caller.endpoint.bucket)}/{encode_path(source)}"}
        if if_match is not None:
            headers["x-amz-copy-source-if-match"] = _quoted(if_match)
        return headers

    def _copy_marker(
        self, source: str, target: str, replace: WriteOptions | None, if_match: ETag | None
    ) -> WriteResult | None:
        """An empty directory object is made anew: versitygw refuses to copy one. None when it has a body."""
        info = self.head(source)
        if if_match is not None and info.etag != if_match:
            raise PreconditionFailed(f"PUT {shown(target)}: {shown(source)} is another version", key=source, status=412)
        if info.size:
            return None
        kept = replace or WriteOptions(metadata=info.metadata, content_type=info.content_type)
        return self.put(target, b"", WriteOptions(metadata=kept.metadata, content_type=kept.content_type))

    def _long(self, call: Call) -> Answer:
        """An operation that may say 200 first and fail afterwards."""
        answer = self._caller.send(call)
        error = self._caller.refuse(call, answer)
        if error is not None:
            raise error
        return answer

    def _conditional(self, call: Call, options: WriteOptions) -> Answer:
        """If-Match on a key that is gone: S3 says 404, the contract PreconditionFailed."""
        try:
            return self._long(call)
        except NotFound as error:
            if options.if_match is None or error.code == "NoSuchUpload":
                raise
            raise PreconditionFailed(
                f"{call.method} {shown(call.key)}: the object is gone",
                key=call.key,
                status=error.status,
                code=error.code,
            ) from error

    def _delete_one(self, key: str) -> list[DeleteFailure]:
        try:
            self.delete(key)
        except StoreError as error:
            if error.transient:
                raise
            return [DeleteFailure(key, error.code, error.server_message)]
        return []


class Pouring:
    """Hands the body of one GET to a sink as it comes."""

    def __init__(self, key: str, byte_range: ByteRange | None, sink: Sink) -> None:
        self._key = key
        self._range = byte_range
        self._sink = sink
        self._info: ObjectInfo | None = None

    def outlet(self) -> Outlet:
        """For the request. A server that ignores Range answers with another status, and is then read as a whole."""
        start = self._range.start if self._range is not None else 0
        return Outlet(200 if self._range is None else 206, start, self._take)

    def info(self, headers: Mapping[str, str], length: int) -> ObjectInfo:
        """The object's facts, from the headers of an answer with a body of `length` bytes. Errors: CorruptBody."""
        size = length
        if self._range is not None:
            size = int(headers.get("content-range", "").rpartition("/")[2] or length)
            _check_length(self._key, length, self._range, size)
        return _describe(self._key, headers, size)

    def _take(self, headers: Mapping[str, str], length: int, offset: int, body: Body) -> None:
        if self._info is None or offset == 0:
            self._info = self.info(headers, length)
        self._sink(self._info, offset, body)


def _described(options: WriteOptions) -> dict[str, str]:
    headers = {f"{_META}{name}": value for name, value in options.metadata.items()}
    if options.content_type:
        headers["content-type"] = options.content_type
    return headers


def _conditions(options: WriteOptions) -> dict[str, str]:
    if options.if_none_match:
        return {"if-none-match": "*"}
    return {"if-match": _quoted(options.if_match)} if options.if_match is not None else {}


def _part(upload_id: UploadId, number: PartNumber) -> list[tuple[str, str]]:
    return [("partNumber", str(number)), ("uploadId", upload_id)]


def _quoted(etag: ETag) -> str:
    return f'"{etag}"'


def _date_ns(answer: Answer) -> int:
    return xml.http_date_ns(answer.headers.get("date", ""))


def _describe(key: str, headers: Mapping[str, str], size: int) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=size,
        etag=xml.unquote_etag(headers.get("etag", "")),
        mtime_ns=xml.http_date_ns(headers.get("last-modified", "")),
        server_time_ns=xml.http_date_ns(headers.get("date", "")),
        metadata=_metadata(headers),
        content_type=headers.get("content-type", ""),
    )


def _metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """User metadata. Others may have written bytes beyond ASCII: shown as an RFC 2047 word, as Amazon's S3 does."""
    found = {name.removeprefix(_META): value for name, value in headers.items() if name.startswith(_META)}
    return {name: value if value.isascii() else _encoded_word(value) for name, value in found.items()}


def _encoded_word(value: str) -> str:
    return f"=?UTF-8?B?{base64.b64encode(value.encode('latin-1', 'replace')).decode()}?="


def _received(key: str, answer: Answer, byte_range: ByteRange | None) -> tuple[Body, ObjectInfo]:
    """Body and facts of a GET; a server that ignores Range sends everything with 200. Errors: CorruptBody."""
    body = answer.body
    partial = answer.headers.get("content-range", "") if answer.status == 206 else ""
    size = int(partial.rpartition("/")[2]) if partial else len(body)
    if byte_range is None:
        return body, _describe(key, answer.headers, size)
    if not partial:
        return memoryview(body)[byte_range.start : byte_range.stop], _describe(key, answer.headers, size)
    _check_length(key, len(body), byte_range, size)
    return body, _describe(key, answer.headers, size)


def _check_length(key: str, length: int, byte_range: ByteRange, size: int) -> None:
    if length != min(byte_range.stop, size) - byte_range.start:
        raise CorruptBody(
            f"GET {shown(key)}: {length} bytes came for range {byte_range.start}-{byte_range.stop}", key=key
        )
