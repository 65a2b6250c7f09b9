"""Maps every HTTP error status and S3 error code to a class of datastore.errors; no other module does that.

Pure. Sources: "Error responses", Amazon S3 API reference; the codes of MinIO (X-Minio) and versitygw as measured.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from datastore import errors as e
from datastore.units import format_roughly

from ..limits import key_bytes, shown

_KINDS: dict[type[e.StoreError], tuple[str, str]] = {
    e.NotFound: ("no such object", "NoSuchKey NoSuchVersion NoSuchUpload 404"),
    e.BucketNotFound: (
        "the bucket does not exist: check the bucket's name and the endpoint",
        "NoSuchBucket InvalidBucketName",
    ),
    e.AlreadyExists: ("the key is taken", ""),
    e.PreconditionFailed: ("the object is another version", "PreconditionFailed 412"),
    e.AccessDenied: (
        "these credentials are not allowed to do that",
        "AccessDenied AllAccessDisabled AccountProblem InvalidObjectState UnauthorizedAccess 403",
    ),
    e.ObjectLocked: ("an object lock keeps it: it can't be replaced or removed before that ends", ""),
    e.CredentialsInvalid: (
        "the credentials are wrong",
        "InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken InvalidToken TokenRefreshRequired InvalidSecurity"
        " CredentialsNotSupported InvalidClientTokenId InvalidTokenId XAdminUserNotFound AuthorizationHeaderMalformed"
        " 401",
    ),
    e.WrongRegion: (
        "the bucket lives in another region",
        "PermanentRedirect TemporaryRedirect Redirect IncorrectEndpoint IllegalLocationConstraintException"
        " InvalidRegion",
    ),
    e.ClockSkew: (
        "this machine's clock and the server's differ too much: set the clock",
        "RequestTimeTooSkewed RequestExpired",
    ),
    e.InvalidKey: (
        "the server refuses this name",
        "InvalidURI XMinioInvalidObjectName XMinioInvalidResourceName",
    ),
    e.KeyTooLong: ("the name is longer than the server takes", "KeyTooLongError KeyTooLong 414"),
    e.KeyConflict: (
        "this server can't hold a file beside a directory of its name",
        "ObjectParentIsFile ExistingObjectIsDirectory ExistingObjectIsFile"
        " XMinioParentIsObject XMinioObjectExistsAsDirectory",
    ),
    e.MetadataTooLarge: ("the user metadata is larger than the server takes", "MetadataTooLarge"),
    e.OutOfSpace: (
        "the storage is full or over its quota",
        "QuotaExceeded InsufficientStorage StorageFull XMinioStorageFull XMinioAdminBucketQuotaExceeded 507",
    ),
    e.Unsupported: (
        "the server does not know this operation",
        "NotImplemented ObjectLockConfigurationNotFoundError MethodNotAllowed UnsupportedOperation 405 501",
    ),
    e.DeadlineExceeded: ("the server gave up waiting", "RequestTimeout 408"),
    e.Throttled: (
        "the server asks for fewer requests",
        "SlowDown SlowDownRead SlowDownWrite TooManyRequests Throttling ThrottlingException RequestLimitExceeded"
        " BandwidthLimitExceeded OperationAborted ConditionalRequestConflict 429",
    ),
    e.ServerFault: ("a fault inside the server", "ServiceUnavailable InternalError"),
    e.CorruptBody: (
        "the body arrived damaged",
        "BadDigest IncompleteBody XAmzContentSHA256Mismatch XAmzContentChecksumMismatch",
    ),
    e.Unreachable: ("the proxy asks for a login", "407"),
}
"""What each class tells the user, and the codes and statuses that mean the class. OperationAborted and
ConditionalRequestConflict refuse a request without effect while another one runs, so the request is retried."""

MEANT = {said: kind for kind, (_, words) in _KINDS.items() for said in words.split()}
"""The class of each code, and of each status for answers without a known code (answers to a HEAD have no body)."""

UNANNOUNCED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Raised by the ssl module when the other side ends the connection; TLS and its settings are not at fault."""

_REDIRECTS = range(300, 400)
"""Statuses that send the client elsewhere: to the bucket's region if S3 says them, else mostly from http to https."""
_OF_PROXIES = frozenset({403, 502, 503, 504})
"""Statuses by which a proxy says that it does not ask a server, or gets no answer from it."""
_SKEW_TAKEN_S = 15 * 60
"""The clock skew that S3 accepts, in seconds; an answer to a HEAD can't say that the skew was larger."""
_NAME_MAX_BYTES = 255
"""The longest part of a key between slashes where each key is a file of a disk (versitygw, MinIO), in bytes."""
_MINIO_MARKER_BYTES = len("__XLDIR__")
"""How many bytes MinIO adds to the file name of a directory marker, a key that ends with a slash."""
_VERSITYGW_BYTES = 28
"""How much longer versitygw's name for a file's new version is; if it is too long, the answer tells of a directory."""
_TELLING = frozenset({"InvalidArgument", "InvalidPart", "InvalidPartOrder", "EntityTooSmall", "MalformedXML"})

_LOCK_WORDS = ("protected by object lock", "worm protected")
"""Words in the message that tell of an object lock: AWS and versitygw send AccessDenied, MinIO InvalidRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A parsed error answer, with what was asked.
    region: where the bucket is, if the server says so; redirect: scheme and host to which it redirects, or '' if it
    names none; skew_s: the server's clock minus this machine's, in seconds; proxy: which proxy was asked to ask the
    server, by plain HTTP, or ''."""

    method: str
    key: str
    status: int
    code: str = ""
    message: str = ""
    request_id: str = ""
    region: str = ""
    redirect: str = ""
    access_key_id: str = ""
    if_none_match: bool = False
    if_match: bool = False
    skew_s: float = 0.0
    proxy: str = ""

    @property
    def by_proxy(self) -> bool:
        """Whether it is the proxy that refuses: S3 gives a reason, except to a HEAD."""
        return bool(self.proxy) and self.status in _OF_PROXIES and not self.code and self.method != "HEAD"


def error_class(refusal: Refusal) -> type[e.StoreError]:
    """Return the error class of a refusal; every refusal has one."""
    if refusal.by_proxy:
        return e.Unreachable
    found = MEANT.get(refusal.code) or MEANT.get(str(refusal.status))
    if found is None:
        found = e.ServerFault if refusal.status >= 500 else e.InvalidRequest
    if refusal.code == "AuthorizationHeaderMalformed" and (refusal.region or "region" in refusal.message):
        return e.WrongRegion
    if refusal.status in _REDIRECTS and refusal.region:
        return e.WrongRegion
    if found is e.PreconditionFailed and refusal.if_none_match:
        return e.AlreadyExists
    if found is e.NotFound and refusal.if_match and refusal.code != "NoSuchUpload":
        return e.PreconditionFailed
    if refusal.status == 403 and not refusal.code and abs(refusal.skew_s) > _SKEW_TAKEN_S:
        return e.ClockSkew
    if found in {e.AccessDenied, e.InvalidRequest} and any(words in refusal.message.lower() for words in _LOCK_WORDS):
        return e.ObjectLocked
    if found is e.NotFound and not refusal.key:
        return e.BucketNotFound
    return _name_refused(refusal, found)


def _name_refused(refusal: Refusal, found: type[e.StoreError]) -> type[e.StoreError]:
    """Return `found`, or what the key itself shows to be wrong: codes that refuse names are vague or missing."""
    segments = key_bytes(refusal.key).split(b"/")
    vague = refusal.status == 400 and found in {e.InvalidRequest, e.InvalidKey} and refusal.code not in _TELLING
    marker = refusal.key.endswith("/")
    limit = _NAME_MAX_BYTES - (_MINIO_MARKER_BYTES if marker and refusal.code.startswith("XMinio") else 0)
    if refusal.code == "ExistingObjectIsDirectory":
        limit -= _VERSITYGW_BYTES
    too_long = max(len(segment) for segment in segments) > limit
    # versitygw answers 500 when it can't create the directory of a marker because the name is too long.
    if too_long and (vague or found is e.KeyConflict or (marker and refusal.status == 500)):
        return e.KeyTooLong
    if vague and any(segment in {b".", b".."} for segment in segments):
        return e.InvalidKey
    is_utf8 = not any("\ud800" <= c <= "\udfff" for c in refusal.key)
    if refusal.status == 403 and refusal.code in {"", "SignatureDoesNotMatch"} and not is_utf8:
        return e.InvalidKey
    return found


def to_error(refusal: Refusal) -> e.StoreError:
    """Return the exception to raise, with the server's own message."""
    kind = error_class(refusal)
    said = ": ".join(part for part in (refusal.code, refusal.message) if part) or f"HTTP status {refusal.status}"
    request = f" (request {one_line(refusal.request_id, 200)})" if refusal.request_id else ""
    what = f"{refusal.method} {shown(refusal.key)}" if refusal.key else f"{refusal.method} of the bucket"
    who = "proxy" if refusal.by_proxy else "server"
    made = kind(
        f"{what}: {_why(kind, refusal)}; {who} says: {one_line(said)}{request}",
        key=refusal.key,
        status=refusal.status,
        code=one_line(refusal.code, 100),
        server_message=one_line(refusal.message),
        request_id=one_line(refusal.request_id, 200),
    )
    if isinstance(made, e.WrongRegion):
        made.region = refusal.region
    return made


def one_line(text: str, limit: int = 300) -> str:
    """Return a server's text for use in a message: without line breaks or control characters, cut at `limit`."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return flat if len(flat) <= limit else flat[:limit] + "..."


def _why(kind: type[e.StoreError], refusal: Refusal) -> str:
    who = refusal.access_key_id
    if refusal.by_proxy:
        return f"the proxy {refusal.proxy} refuses or can't reach the server: check HTTP_PROXY and NO_PROXY"
    if refusal.code == "SignatureDoesNotMatch" and kind is not e.InvalidKey:
        return f"the secret access key is wrong for access key id {who}"
    if refusal.code in {"InvalidAccessKeyId", "InvalidClientTokenId", "XAdminUserNotFound"}:
        return f"access key id {who} is not known to the server"
    if refusal.code in {"ExpiredToken", "TokenRefreshRequired"}:
        return f"the session token of access key id {who} has expired"
    if kind is e.ClockSkew and refusal.skew_s:
        side = "behind" if refusal.skew_s > 0 else "ahead of"
        return f"this machine's clock is {format_roughly(refusal.skew_s)} {side} the server's: set it"
    if refusal.code == "NoSuchUpload":
        return "no such multipart upload"
    if kind is e.PreconditionFailed and refusal.status == 404:
        return "the object is gone"
    if kind is e.WrongRegion and refusal.region:
        return f"the bucket lives in region {refusal.region}"
    if kind is e.InvalidRequest and refusal.status in _REDIRECTS:
        to = refusal.redirect
        advice = f"if that is your S3 server, write {to} into spec.s3.endpoint" if to else "check the endpoint"
        return f"the endpoint redirects to {to or 'another place'}, and no redirect is followed: {advice}"
    return _KINDS[kind][0] if kind in _KINDS else "the server refuses the request"


_BAD_CERTIFICATES = {
    9: "its TLS certificate is not valid yet: set this machine's clock",
    10: "its TLS certificate has expired: renew it on the server (or set this machine's clock)",
    62: "its TLS certificate is for another host ({}): write a name that it is for into spec.s3.endpoint",
    64: "its TLS certificate is for another host ({}): write a name that it is for into spec.s3.endpoint",
}
"""Messages by OpenSSL's X509_V_ERR_ number; all other numbers are about the signer of the certificate."""
_NOT_TRUSTED = (
    "its TLS certificate is not trusted ({}): put the certificate authority that signed it into spec.s3.caBundle"
)


def connection_words(error: Exception, proxy_variable: str = "") -> str:
    """Return what went wrong at the connection, and what the user can do about it.
    proxy_variable: the environment variable with the proxy to which a connection was to be made, if any."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _BAD_CERTIFICATES.get(error.verify_code, _NOT_TRUSTED).format(one_line(error.verify_message))
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS: write http:// in spec.s3.endpoint, or the port that does"
    if isinstance(error, ssl.SSLError) and not isinstance(error, UNANNOUNCED):
        return f"TLS failed ({one_line(str(error.reason or error))}): check https:// in the endpoint and caBundle"
    if isinstance(error, socket.gaierror):
        if proxy_variable:
            return f"the proxy's host name does not resolve: check {proxy_variable} and NO_PROXY"
        return "the host name does not resolve: check the endpoint"
    if isinstance(error, ConnectionRefusedError):
        if proxy_variable:
            return f"nothing listens at the proxy (connection refused): check {proxy_variable} and NO_PROXY"
        return "nothing listens there (connection refused): check the endpoint's host and port"
    return f"the connection failed ({one_line(str(error)) or type(error).__name__})"
