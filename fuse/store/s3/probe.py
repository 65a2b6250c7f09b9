"""Finds out within a few seconds, before anything is mounted, whether a location is right, or what is wrong with it.

It lists one key, for which the endpoint, the keys, the region and the bucket must be right, and creates the bucket
when asked to. It writes no object. MinIO and versitygw are recognised by the Server header of the answer, and
s3/lister.py looks at that of each later answer. What only writes could find out keeps its default: parts of keys
between slashes have up to 1,024 bytes (a server that takes fewer answers KeyTooLong).
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import replace

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

from ...loop import in_time, now
from ..base import Capabilities
from . import xml
from .caller import Caller, gather
from .endpoint import DEFAULT_REGION, Endpoint
from .errors import one_line
from .lister import known_by, look
from .messages import Request
from .transport import TransportLimits

_TLS_S = 1.0
"""Timeout of each step of the check whether a port speaks TLS, in seconds."""
_LOOKING = "looking for credentials: check credential_process and the like in the AWS configuration"
_OWNED = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})


def probe(location: S3Location, *, writable: bool, deadline_s: float = 5.0) -> Capabilities:
    """Return what the server at a location can do. writable: the bucket may be created if location.create says so.

    Errors, each naming what is wrong and holding the server's words: CredentialsInvalid, AccessDenied, BucketNotFound,
    WrongRegion (only when the location names a region), ClockSkew, Unreachable, DeadlineExceeded, InvalidRequest.
    It returns or raises within deadline_s, even when a name server or a credential_process hangs.
    """
    stage = _LOOKING
    limits = TransportLimits(connections=1, connect_s=deadline_s / 2, idle_s=deadline_s, call_s=deadline_s)

    async def check() -> Capabilities:
        nonlocal stage
        caller = gather(location, limits, follow=not location.region)
        caller.credentials.keys()
        endpoint = caller.endpoint
        stage = f"waiting for {endpoint.service_url}: check the endpoint, the proxy and the network"
        try:
            try:
                return known_by((await look(caller, location.prefix))[1], Capabilities())
            except BucketNotFound as error:
                if not (location.create and writable and error.code):
                    raise
                await _create(caller)
                return Capabilities()
        except StoreError as error:
            raise _explained(error, location, endpoint) from error
        finally:
            caller.close()

    try:
        return in_time(lambda: now(check()), deadline_s, "datastore-probe")
    except TimeoutError:
        kind = CredentialsInvalid if stage is _LOOKING else DeadlineExceeded
        raise kind(f"{_name(location)}: no answer within {deadline_s:g} s while {stage}") from None


async def _create(caller: Caller) -> None:
    region = caller.endpoint.region
    named = caller.endpoint.aws and region != DEFAULT_REGION
    try:
        await caller.send(Request(method="PUT", body=xml.build_location(region) if named else b""))
    except StoreError as error:
        if error.code not in _OWNED:
            raise


def remove_bucket(location: S3Location, deadline_s: float = 10.0) -> None:
    """Remove an empty bucket; that it does not exist is no error. Errors: StoreError, InvalidRequest if not empty."""
    caller = gather(location, TransportLimits(connections=1, call_s=deadline_s), follow=not location.region)
    try:
        now(caller.send(Request(method="DELETE")))
    except BucketNotFound:
        return
    finally:
        caller.close()


def _explained(error: StoreError, location: S3Location, endpoint: Endpoint) -> StoreError:
    """Return the same error with a text that names the field of the manifest to correct."""
    kind, hint = type(error), _HINTS.get(type(error), "")
    wordless = 300 <= error.status < 500 and not error.code and not isinstance(error, Unreachable)
    no_s3 = wordless or isinstance(error, CorruptBody | Unreachable)
    if no_s3 and not endpoint.secure and _speaks_tls(endpoint):
        url = replace(endpoint, scheme="https").service_url
        return InvalidRequest(f"{_name(location)}: spec.s3.endpoint: this port speaks TLS: try {url}")
    if isinstance(error, CorruptBody) or wordless:  # S3 gives a reason for each refusal of a listing
        kind, hint = InvalidRequest, f"spec.s3.endpoint: {endpoint.service_url} does not answer like an S3 server"
    text = f"{_name(location)}: {hint}{': ' if hint else ''}{one_line(str(error), 600)}"
    made = kind(text)
    vars(made).update(vars(error))
    return made


def _speaks_tls(endpoint: Endpoint) -> bool:
    """Whether the server at the endpoint completes a TLS handshake; its certificate is not verified."""
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
