"""The tree of errors; every layer raises one of these and maps it once, at its own edge.

DatastoreError
 |- InvalidManifest         the user's file is wrong: names the field            (exit code 2)
 |- StoreError              the storage said no, or did not answer
 |   |- NotFound            no such key
 |   |- BucketNotFound      no such bucket
 |   |- AlreadyExists       If-None-Match refused: the key is there
 |   |- PreconditionFailed  If-Match refused: the object is another version
 |   |- AccessDenied        signed correctly, not allowed
 |   |   '- ObjectLocked    under an object lock, which keeps it as it is
 |   |- CredentialsInvalid  missing, unknown or expired keys, wrong signature
 |   |- HostUntrusted       the server shows another key than is known of it
 |   |- EndpointNotAllowed  the administrator does not let tenants have this server asked
 |   |- WrongRegion         the bucket lives in another region
 |   |- ClockSkew           our clock and the server's differ too much
 |   |- InvalidKey          the server refuses this name
 |   |- KeyTooLong          the server or S3 refuses the length of this name
 |   |- KeyConflict         the server can't hold `a` beside `a/b`
 |   |- InvalidRequest      any other 4xx: ours to fix
 |   |- MetadataTooLarge    user metadata over 2 KiB
 |   |- OutOfSpace          quota or disk of the server is full
 |   |- Unsupported         the server does not know the operation
 |   '- TransientStoreError worth another try
 |       |- Unreachable     no connection, or it broke, or TLS failed
 |       |- DeadlineExceeded  no answer in time
 |       |- Throttled       503 SlowDown, 429
 |       |- ServerStarting  the server that was made for it does not serve yet
 |       |- ServerFault     500, 502, 503, 504
 |       '- CorruptBody     shorter than promised, or wrong checksum
 |- MountFailed             the kernel or fusermount3 refused
 '- CacheCorrupt            local state did not validate

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
    """The storage refused or failed.

    key: the object concerned ('' for the bucket); status: HTTP status or 0; code: the server's error code or '';
    server_message: the server's own words or ''; request_id: for the storage's administrator.
    """

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
    """A create-only write found the key taken."""


class PreconditionFailed(StoreError):
    """The object is not the version that was asked for."""


class AccessDenied(StoreError):
    """The caller is known but not allowed."""


class ObjectLocked(AccessDenied):
    """An object lock keeps the object as it is: whatever the credentials, it can't be replaced or removed."""


class CredentialsInvalid(StoreError):
    """No keys, unknown or expired keys, or a signature that does not match."""


class EndpointNotAllowed(StoreError):
    """The administrator does not allow this server, or an address that its name leads to."""


class HostUntrusted(StoreError):
    """The server shows another key than is known of it, or none is known."""


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
    """Another refusal by the server, which a repetition won't change."""


class MetadataTooLarge(StoreError):
    """User metadata is over what the server takes (S3: 2 KiB)."""


class OutOfSpace(StoreError):
    """The storage is full or over its quota."""


class Unsupported(StoreError):
    """The server does not know this operation."""


class TransientStoreError(StoreError):
    """May succeed when tried again."""

    transient = True


class Unreachable(TransientStoreError):
    """No connection, a broken one, or a TLS failure."""


class DeadlineExceeded(TransientStoreError):
    """No answer before the deadline."""


class ServerStarting(TransientStoreError):
    """The server that was made for the storage does not serve yet, or not again yet."""


class Throttled(TransientStoreError):
    """The server asks for fewer requests."""


class ServerFault(TransientStoreError):
    """A fault inside the server."""


class CorruptBody(TransientStoreError):
    """The body was cut short or does not match its checksum."""


class MountFailed(DatastoreError):
    """The kernel or fusermount3 refused the mount; the text says why and what to do."""


class CacheCorrupt(DatastoreError):
    """Local state did not validate; it is fetched again, never served."""


def error_named(kind: str, text: str, otherwise: type[DatastoreError] = DatastoreError) -> DatastoreError:
    """The error that another of our processes reported by the name of its class; `otherwise` for an unknown name."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, DatastoreError):
        return found(text)
    return otherwise(text)
