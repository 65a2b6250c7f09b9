"""What keeps a Datastore from being Ready, each with its reason for programs. One table; pure."""

from __future__ import annotations

import re

from datastore import errors
from datastore.errors import DatastoreError
from datastore.logs import redact

REASONS: dict[type[DatastoreError], str] = {
    errors.BucketNotFound: "BucketNotFound",
    errors.CredentialsInvalid: "CredentialsInvalid",
    errors.AccessDenied: "AccessDenied",
    errors.HostUntrusted: "HostUntrusted",
    errors.EndpointNotAllowed: "EndpointNotAllowed",
    errors.WrongRegion: "WrongRegion",
    errors.ClockSkew: "ClockSkew",
    errors.Unreachable: "EndpointUnreachable",
    errors.DeadlineExceeded: "EndpointUnreachable",
    errors.Throttled: "Throttled",
    errors.ServerFault: "ServerFault",
    errors.ServerStarting: "ServerStarting",
    errors.CorruptBody: "ServerFault",
    errors.OutOfSpace: "OutOfSpace",
    errors.InvalidManifest: "InvalidSpec",
    errors.StoreError: "StorageRefused",
    errors.DatastoreError: "Failed",
}
"""Asked from the most special class of an error to the most general."""
ABOUT_CREDENTIALS = frozenset({"CredentialsInvalid", "SecretNotFound", "SecretInvalid", "CredentialsMissing"})
"""Of these CredentialsValid is False; of the others it says nothing, or True if the server went on to look."""
PAST_CREDENTIALS = frozenset({"BucketNotFound", "AccessDenied", "OutOfSpace"})
"""The server answers these only to keys it knows."""
MESSAGE_MAX = 1024
"""Events take 1,024 bytes; longer server messages are cut."""
_REQUEST = re.compile(r" \(request [^()]*\)")
"""Another one each time: it would make a new status of the same fault."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


class Mistake(DatastoreError):
    """The user's or the administrator's to correct. permanent: only a change of an object that we watch helps."""

    def __init__(self, reason: str, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.permanent = permanent


def reason_of(error: DatastoreError) -> str:
    """One CamelCase word."""
    if isinstance(error, Mistake):
        return error.reason
    return next(REASONS[kind] for kind in type(error).__mro__ if kind in REASONS)


def message_of(error: BaseException) -> str:
    """One line for people, with the server's words, without secrets, of at most MESSAGE_MAX bytes."""
    text = _CONTROL.sub(" ", _REQUEST.sub("", redact(str(error)))).strip()
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= MESSAGE_MAX else raw[: MESSAGE_MAX - 3].decode("utf-8", "ignore") + "..."
