"""The tree of errors. Every layer raises one of these, and translates it (to an errno, an exit code, ...) only once,
at its own edge.

DatastoreError
 |- InvalidManifest         the user's file is wrong: names the field            (exit code 2)
 |- StoreError              the storage refused, failed, or did not answer
 |   |- NotFound            no such key
 |   |- BucketNotFound      no such bucket
 |   |- AlreadyExists       If-None-Match failed: the key exists
 |   |- PreconditionFailed  If-Match failed: the object is another version
 |   |- AccessDenied        signed correctly, not allowed
 |   |   '- ObjectLocked    an object lock forbids replacing or removing the object
 |   |- CredentialsInvalid  missing, unknown or expired keys, wrong signature
 |   |- HostUntrusted       the server's SSH host key is not the known one, or none is known
 |   |- EndpointNotAllowed  the administrator does not allow this server for tenants
 |   |- WrongRegion         the bucket lives in another region
 |   |- ClockSkew           our clock and the server's differ too much
 |   |- InvalidKey          the server refuses this name
 |   |- KeyTooLong          the server or S3 refuses the length of this name
 |   |- KeyConflict         the server can't hold `a` beside `a/b`
 |   |- InvalidRequest      any other 4xx: a mistake of this program or its settings
 |   |- MetadataTooLarge    user metadata over 2 KiB
 |   |- OutOfSpace          quota or disk of the server is full
 |   |- Unsupported         the server does not know the operation
 |   '- TransientStoreError may succeed when tried again
 |       |- Unreachable     no connection, a broken connection, or a TLS failure
 |       |- DeadlineExceeded  no answer in time
 |       |- Throttled       503 SlowDown, 429
 |       |- ServerStarting  the server that was started for this storage does not serve yet
 |       |- ServerFault     500, 502, 503, 504
 |       '- CorruptBody     the body is shorter than announced, or its checksum is wrong
 |- MountFailed             the kernel or fusermount3 refused
 '- CacheCorrupt            local state failed its validation

`transient` on the class decides whether datastore.fuse.store.retrying tries again; nothing else retries.
The text of an error is one line for a person: what failed, on which object, why, what to do. Never a secret.
"""

from __future__ import annotations


class DatastoreError(Exception):
    """Root of the tree."""

    transient: bool = False


class InvalidManifest(DatastoreError):
    """The manifest is wrong; the text names the field."""


class StoreError(DatastoreError):
    """The storage refused or failed. key: the object concerned ('' for the bucket); status: HTTP status or 0; code:
    the server's error code or ''; server_message: the server's own message or ''; request_id: the server's id of the
    request, for its administrator."""

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        status: int = 0,
        code: str = "",
        server_message: str = "",
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.key = key
        self.status = status
        self.code = code
        self.server_message = server_message
        self.request_id = request_id


class NotFound(StoreError):
    """No object has this key."""


class BucketNotFound(StoreError):
    """The bucket does not exist."""


class AlreadyExists(StoreError):
    """A create-only write found an object with its key."""


class PreconditionFailed(StoreError):
    """The object is not the version that was asked for."""


class AccessDenied(StoreError):
    """The caller is known but not allowed."""


class ObjectLocked(AccessDenied):
    """An object lock keeps the object: no credentials allow replacing or removing it."""


class CredentialsInvalid(StoreError):
    """No keys, unknown or expired keys, or a signature that does not match."""


class EndpointNotAllowed(StoreError):
    """The administrator does not allow this server, or an address that its name leads to."""


class HostUntrusted(StoreError):
    """The server's SSH host key is not the one that is known for it, or none is known."""


class WrongRegion(StoreError):
    """The bucket lives in another region; `region` names it, or is ''."""

    region: str = ""


class ClockSkew(StoreError):
    """The request's time is too far from the server's."""


class InvalidKey(StoreError):
    """The server refuses this name."""


class KeyTooLong(StoreError):
    """The name is longer than S3 (1,024 bytes) or this server allows."""


class KeyConflict(StoreError):
    """The server can't hold an object `a` beside `a/b`."""


class InvalidRequest(StoreError):
    """Another refusal by the server, which a retry won't change."""


class MetadataTooLarge(StoreError):
    """The user metadata is larger than the server allows (S3: 2 KiB)."""


class OutOfSpace(StoreError):
    """The storage is full or over its quota."""


class Unsupported(StoreError):
    """The server does not know this operation."""


class TransientStoreError(StoreError):
    """The request may succeed when it is tried again."""

    transient = True


class Unreachable(TransientStoreError):
    """There is no connection, it broke, or TLS failed."""


class DeadlineExceeded(TransientStoreError):
    """No answer before the deadline."""


class ServerStarting(TransientStoreError):
    """The server that was started for the storage does not serve yet, or not again after a restart."""


class Throttled(TransientStoreError):
    """The server asks for fewer requests."""


class ServerFault(TransientStoreError):
    """A fault inside the server."""


class CorruptBody(TransientStoreError):
    """The body was cut short or does not match its checksum."""


class MountFailed(DatastoreError):
    """The kernel or fusermount3 refused the mount; the text says why and what to do."""


class CacheCorrupt(DatastoreError):
    """Local state failed its validation; its data is fetched again and never served from there."""


def error_named(kind: str, text: str, otherwise: type[DatastoreError] = DatastoreError) -> DatastoreError:
    """Return the error that another of our processes reported. kind: the name of its class; if unknown, `otherwise`."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, DatastoreError):
        return found(text)
    return otherwise(text)
