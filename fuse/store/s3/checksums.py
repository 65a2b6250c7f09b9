"""CRC-32 of what is sent: by it the store notices a body that arrived otherwise, and refuses it as BadDigest.

An upload in parts declares the algorithm when it begins. Only where the server repeats it in its answer does each part
carry its checksum, and the completion all of them. It must also say that the object's will be one of its parts' (as
servers do since 2025): moto does not, and shows every reader a wrong one. A single PUT just carries its checksum: who
does not know the header ignores it. Some refuse it (R2 and Backblaze B2 did so for years, s3proxy refuses every header
that it does not know): then the request is repeated without, and this bucket is not offered any again.

Parts that are sent beside copied ones carry their MD5, which every server has always known: of the copied ones there is
no checksum, and servers make none of the whole, or a wrong one.
Source: "Checking object integrity for data uploads in Amazon S3", Amazon S3 user guide.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from hashlib import md5
from typing import Any

from isal.isal_zlib import crc32

from datastore.errors import CredentialsInvalid, InvalidRequest, NotFound, StoreError, Unsupported
from datastore.logs import fields

from ..base import Body, ETag, FilePart, PartNumber, UploadId
from . import xml
from .messages import Answer, Request, unquote_etag

log = logging.getLogger(__name__)

_ALGORITHM = "CRC32"
_DECLARED = "x-amz-checksum-algorithm"
_KIND, _OF_PARTS = "x-amz-checksum-type", "COMPOSITE"
_SUM = "x-amz-checksum-crc32"

Send = Callable[[Request], Coroutine[Any, Any, Answer]]


def crc32_of(body: Body | FilePart) -> str:
    """CRC-32 as S3 writes it: base64 of four bytes, the highest first. OSError of a file."""
    crc = 0
    for piece in _pieces(body):
        crc = crc32(piece, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def md5_of(body: Body | FilePart) -> str:
    """MD5 as Content-MD5 has it (RFC 1864). OSError of a file."""
    digest = md5(usedforsecurity=False)
    for piece in _pieces(body):
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def _pieces(body: Body | FilePart) -> Iterable[Body]:
    return body.pieces() if isinstance(body, FilePart) else (body,)


class _Offer:
    """A header that a server may refuse: the first refusal is the last."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._taken = self._refused = False

    async def send(self, request: Request, name: str, value: str) -> Answer:
        """The answer to a call with one more header, or else without it. Errors: those of `send`."""
        if self._refused:
            return await self._send(request)
        without, request.headers = request.headers, {**request.headers, name: value}
        try:
            answer = await self._send(request)
            self._taken = True
            return answer
        except StoreError as error:
            if self._taken or not _may_be_header(error):
                raise
            why = str(error)
        finally:
            request.headers = without
        answer = await self._send(request)  # what is refused for another reason is refused again
        self.end(why)
        return answer

    def end(self, why: str) -> None:
        """The server is not to have it again."""
        self._refused = True
        log.info("this store takes no checksums of what is sent", extra=fields(why=why))


def _may_be_header(error: StoreError) -> bool:
    """400 and 501 in the words of each server; one that leaves unknown headers out of the signature finds it wrong."""
    if isinstance(error, CredentialsInvalid):
        return error.code == "SignatureDoesNotMatch"
    return isinstance(error, InvalidRequest | Unsupported)


class Checksums:
    """Those that one bucket's server is sent, and of the parts of uploads under way. Threads: any; each
    statement that changes something is one step.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._puts = _Offer(send)
        self._uploads = _Offer(send)
        self._parts: dict[UploadId, dict[tuple[PartNumber, ETag], str] | None] = {}
        """By upload that declared the algorithm; it is forgotten when that ends. None: some of its parts are copied,
        and the others carry their MD5."""

    async def put(self, request: Request) -> Answer:
        """PutObject with the checksum of its body."""
        return await self._puts.send(request, _SUM, crc32_of(request.body))

    async def begin(self, request: Request, abort: Callable[[UploadId], Coroutine[Any, Any, None]]) -> UploadId:
        """CreateMultipartUpload of parts that are all sent."""
        answer = await self._uploads.send(request, _DECLARED, _ALGORITHM)
        begun = xml.parse_upload_id(bytes(answer.body))
        said = answer.headers.get(_DECLARED, ""), answer.headers.get(_KIND, "")
        if said == (_ALGORITHM, _OF_PARTS):
            self._parts[begun] = {}
        elif said[0]:
            self._uploads.end(f"a checksum of {said[0]} would be of kind {said[1]!r}")
            await abort(begun)
            begun = xml.parse_upload_id(bytes((await self._send(request)).body))
        return begun

    def mixed(self, begun: UploadId) -> UploadId:
        """An upload of which some parts are copied."""
        self._parts[begun] = None
        return begun

    async def part(self, request: Request, upload_id: UploadId, number: PartNumber) -> ETag:
        """UploadPart."""
        known, value = self._parts.get(upload_id), ""
        if known is not None:
            value = crc32_of(request.body)
            request.headers = {**request.headers, _SUM: value}
        elif upload_id in self._parts:
            request.headers = {**request.headers, "content-md5": md5_of(request.body)}
        etag = unquote_etag((await self._sent(request, upload_id)).headers.get("etag", ""))
        if known is not None:
            known[number, etag] = value
        return etag

    async def complete(self, request: Request, upload_id: UploadId) -> Answer:
        """CompleteMultipartUpload, of which the body was built with of()."""
        try:
            answer = await self._sent(request, upload_id)
        except NotFound:
            self.forget(upload_id)
            raise
        self.forget(upload_id)
        return answer

    def of(self, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]]) -> list[str]:
        """The parts' checksums as XML; '' where there is none."""
        known = self._parts.get(upload_id) or {}
        return [f"<Checksum{_ALGORITHM}>{known[one]}</Checksum{_ALGORITHM}>" if one in known else "" for one in parts]

    def forget(self, upload_id: UploadId) -> None:
        """An upload is at its end."""
        self._parts.pop(upload_id, None)

    async def _sent(self, request: Request, upload_id: UploadId) -> Answer:
        """A server that repeats the algorithm and then refuses its use gets the next upload without."""
        try:
            return await self._send(request)
        except (InvalidRequest, Unsupported) as error:
            if self._parts.get(upload_id) is not None:
                self._uploads.end(str(error))
            raise
