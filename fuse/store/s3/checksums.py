"""CRC-32 of what is sent: by the checksum the store notices a body that was damaged on its way, and sends BadDigest.

A multipart upload declares the algorithm when it begins. Only if the server repeats it in its answer, each part carries
its checksum, and the completion carries all of them. The server must also say that it computes the object's checksum
from those of the parts (as servers do since 2025): moto does not, and shows every reader a wrong one. A single PUT just
carries its checksum, and most servers that don't know the header ignore it. Some refuse it (R2 and Backblaze B2 did so
for years, s3proxy refuses every unknown header): then the request is repeated, and later ones are sent, without it.

In an upload with copied parts, the other parts carry their MD5, which every server has always known: copied parts have
no checksum, and servers then make none of the whole object, or a wrong one.
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
from .messages import Answer, Request, written_etag

log = logging.getLogger(__name__)

_ALGORITHM = "CRC32"
_DECLARED = "x-amz-checksum-algorithm"
_KIND, _OF_PARTS = "x-amz-checksum-type", "COMPOSITE"
_SUM = "x-amz-checksum-crc32"

Send = Callable[[Request], Coroutine[Any, Any, Answer]]


def crc32_of(body: Body | FilePart) -> str:
    """Return the CRC-32 as S3 writes it: base64 of four bytes, big-endian. Errors: OSError from reading a file."""
    crc = 0
    for piece in _pieces(body):
        crc = crc32(piece, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def md5_of(body: Body | FilePart) -> str:
    """Return the MD5 as in Content-MD5 (RFC 1864). Errors: OSError from reading a file."""
    digest = md5(usedforsecurity=False)
    for piece in _pieces(body):
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def _pieces(body: Body | FilePart) -> Iterable[Body]:
    return body.pieces() if isinstance(body, FilePart) else (body,)


class _Offer:
    """A header that a server may refuse; after the first refusal it is not sent again."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._taken = self._refused = False

    async def send(self, request: Request, name: str, value: str) -> Answer:
        """Return the answer to a request with one more header, or without it if it is refused. Errors: as of `send`."""
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
        answer = await self._send(request)  # raises if the refusal was not about the header
        self.end(why)
        return answer

    def end(self, why: str) -> None:
        """Do not send the header to this server again."""
        self._refused = True
        log.info("this store takes no checksums of what is sent", extra=fields(why=why))


def _may_be_header(error: StoreError) -> bool:
    """Return whether an error may be a refusal of the header: 400 or 501, or SignatureDoesNotMatch from a server that
    computes the signature without unknown headers."""
    if isinstance(error, CredentialsInvalid):
        return error.code == "SignatureDoesNotMatch"
    return isinstance(error, InvalidRequest | Unsupported)


class Checksums:
    """Sends checksums to one bucket's server, and keeps those of the parts of unfinished uploads. Threads: any; each
    statement that changes something is atomic."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._puts = _Offer(send)
        self._uploads = _Offer(send)
        self._parts: dict[UploadId, dict[tuple[PartNumber, ETag], str] | None] = {}
        """Checksums of the parts of each upload that declared the algorithm, until the upload ends. None: some of the
        upload's parts are copied, and the others carry their MD5."""

    async def put(self, request: Request) -> Answer:
        """PutObject with the checksum of its body."""
        return await self._puts.send(request, _SUM, crc32_of(request.body))

    async def begin(self, request: Request, abort: Callable[[UploadId], Coroutine[Any, Any, None]]) -> UploadId:
        """CreateMultipartUpload, no part is copied. abort: drops an upload if its kind of checksum is unusable."""
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
        """Note that some parts of an upload are copied; return the upload's id."""
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
        etag = written_etag(request, await self._sent(request, upload_id))
        if known is not None:
            known[number, etag] = value
        return etag

    async def complete(self, request: Request, upload_id: UploadId) -> Answer:
        """CompleteMultipartUpload; the request's body contains the checksums from of()."""
        try:
            answer = await self._sent(request, upload_id)
        except NotFound:
            self.forget(upload_id)
            raise
        self.forget(upload_id)
        return answer

    def of(self, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]]) -> list[str]:
        """Return the parts' checksums as XML elements, '' where there is none."""
        known = self._parts.get(upload_id) or {}
        return [f"<Checksum{_ALGORITHM}>{known[one]}</Checksum{_ALGORITHM}>" if one in known else "" for one in parts]

    def forget(self, upload_id: UploadId) -> None:
        """Drop the checksums of an upload that has ended."""
        self._parts.pop(upload_id, None)

    async def _sent(self, request: Request, upload_id: UploadId) -> Answer:
        """Send a request of an upload. If it is refused and carries checksums, later uploads get none."""
        try:
            return await self._send(request)
        except (InvalidRequest, Unsupported) as error:
            if self._parts.get(upload_id) is not None:
                self._uploads.end(str(error))
            raise
