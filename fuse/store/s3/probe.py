"""Is this location right? One answer within a few seconds, naming what is wrong, before anything is mounted.

It sends a listing of one key, which needs the endpoint, the keys, the region and the bucket to be right, and creates
the bucket when asked to. It writes no object. What MinIO and versitygw do otherwise is known by the answer's Server
header (s3/lister.py makes sure of it); what needs writes to be learned stays at its conservative value:
conditional_delete False, file_beside_directory True (a server that can't answers KeyConflict), segments of 1,024 bytes
(a server that takes fewer answers KeyTooLong).
"""

from __future__ import annotations

import socket
import ssl
import threading

from datastore.api.source import S3Location
from datastore.errors import (
    AccessDenied,
    BucketNotFound,
    CorruptBody,
    CredentialsInvalid,
    DeadlineExceeded,
    InvalidRequest,
    StoreError,
    Unreachable,
    WrongRegion,
)

from ...loop import now
from ..base import Capabilities
from . import xml
from .caller import Caller
from .connections import TransportLimits
from .endpoint import DEFAULT_REGION, Endpoint
from .errors import one_line
from .factory import Parts, gather
from .lister import known_by
from .messages import Request

_TLS_S = 1.0
"""For each step of a look whether a port speaks TLS."""
_OWNED = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})


def probe(location: S3Location, *, writable: bool, deadline_s: float = 5.0) -> Capabilities:
    """What the server at a location can do. writable: the bucket may be created when location.create says so.

    Errors, each naming what is wrong and holding the server's words: CredentialsInvalid, AccessDenied, BucketNotFound,
    WrongRegion (only when the location names a region), ClockSkew, Unreachable, DeadlineExceeded, InvalidRequest.
    Returns or raises within deadline_s, also when a name server or credential helper hangs.
    """
    asked = _Asked(location, writable, deadline_s)
    worker = threading.Thread(target=asked.run, name="datastore-probe", daemon=True)
    worker.start()
    worker.join(deadline_s)
    if asked.error is not None:
        raise asked.error
    if not asked.done:
        raise DeadlineExceeded(f"{_name(location)}: no answer within {deadline_s:g} s while {asked.stage}")
    return asked.known


class _Asked:
    """The probe's own thread: it may outlive the answer, bounded by the limits of each of its steps."""

    def __init__(self, location: S3Location, writable: bool, deadline_s: float) -> None:
        self.stage = "looking for credentials"
        self.done = False
        self.error: Exception | None = None
        self.known = Capabilities()
        self._location = location
        self._writable = writable
        half = deadline_s / 2
        self._limits = TransportLimits(connections=1, connect_s=half, idle_s=deadline_s, call_s=deadline_s)

    def run(self) -> None:
        try:
            now(self._check())
            self.done = True
        except Exception as error:  # handed to the caller's thread
            self.error = error

    async def _check(self) -> None:
        parts = gather(self._location, self._limits)
        parts.credentials.keys()
        self.stage = f"waiting for {parts.endpoint.service_url}: check the endpoint, the proxy and the network"
        caller = Caller(parts.endpoint, parts.credentials, parts.connect, follow=not self._location.region)
        try:
            try:
                await self._list(caller)
            except BucketNotFound as error:
                if not (self._location.create and self._writable and error.code):
                    raise
                await self._create(parts, caller)
        except StoreError as error:
            raise _explained(error, self._location, parts.endpoint) from error
        finally:
            caller.close()

    async def _list(self, caller: Caller) -> None:
        query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", "1"), ("prefix", self._location.prefix)]
        answer = await caller.send(Request(method="GET", query=query, most_bytes=xml.most_bytes(1)))
        xml.parse_list(bytes(answer.body), 1)
        self.known = known_by(answer, Capabilities())

    async def _create(self, parts: Parts, caller: Caller) -> None:
        region = parts.endpoint.region
        named = parts.endpoint.aws and region != DEFAULT_REGION
        try:
            await caller.send(Request(method="PUT", body=xml.build_location(region) if named else b""))
        except StoreError as error:
            if error.code not in _OWNED:
                raise


def _explained(error: StoreError, location: S3Location, endpoint: Endpoint) -> StoreError:
    """The same error, its text naming the field of the manifest to correct."""
    kind, hint = type(error), _HINTS.get(type(error), "")
    wordless = 300 <= error.status < 500 and not error.code
    no_s3 = wordless or isinstance(error, CorruptBody | Unreachable)
    if no_s3 and not endpoint.secure and _speaks_tls(endpoint):
        return InvalidRequest(
            f"{_name(location)}: spec.s3.endpoint: this port speaks TLS: try {endpoint.in_tls().service_url}"
        )
    if isinstance(error, CorruptBody) or wordless:  # S3 gives a reason for each refusal of a listing
        kind, hint = InvalidRequest, f"spec.s3.endpoint: {endpoint.service_url} does not answer like an S3 server"
    text = f"{_name(location)}: {hint}{': ' if hint else ''}{one_line(str(error), 600)}"
    made = kind(
        text,
        key=error.key,
        status=error.status,
        code=error.code,
        server_message=error.server_message,
        request_id=error.request_id,
    )
    if isinstance(made, WrongRegion) and isinstance(error, WrongRegion):
        made.region = error.region
    return made


def _speaks_tls(endpoint: Endpoint) -> bool:
    """Whether who listens there agrees upon TLS; with whom it is does not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), _TLS_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host),
        ):
            return True
    except OSError:
        return False


_HINTS: dict[type[StoreError], str] = {
    BucketNotFound: "spec.s3.bucket is wrong (or set spec.s3.create: true)",
    WrongRegion: "spec.s3.region is wrong",
    CredentialsInvalid: "the credentials are wrong",
    AccessDenied: "the credentials don't give access to this bucket",
}


def _name(location: S3Location) -> str:
    return f"s3://{location.bucket}/{location.prefix} at {location.endpoint or 'AWS'}"
