"""Checks of whether a Datastore's storage can be used from here: endpoint, credentials, bucket, permissions, clocks.

They write one small object and remove it, but only if the Datastore is writable and the bucket has no object lock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing

from datastore.api.source import S3Location
from datastore.cli.exitcodes import exit_code_for
from datastore.cli.findings import Finding, bad, ok, warn
from datastore.errors import (
    AccessDenied,
    BucketNotFound,
    ClockSkew,
    CredentialsInvalid,
    DatastoreError,
    DeadlineExceeded,
    ObjectLocked,
    StoreError,
    Unreachable,
    Unsupported,
    WrongRegion,
)
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3 import open_s3, probe
from datastore.units import format_roughly

PROBE_DEADLINE_S = 5.0
MAX_SKEW_S = 60.0
"""Servers refuse a skew of 15 minutes; a minute already makes the times of files misleading."""
OBJECT_NAME = ".datastore-doctor-"

_LOCKED = (
    "the bucket has object lock: what that keeps can't be replaced or removed, such calls fail with EPERM; nothing is "
    "written to try"
)
_LOCK_ADVICE = "mount it readOnly, or use a bucket without object lock"
_ADVICE: dict[type[StoreError], str] = {
    ObjectLocked: _LOCK_ADVICE,
    CredentialsInvalid: "check the Secret, or `aws configure list` for the default chain",
    AccessDenied: "ask for s3:ListBucket, GetObject, PutObject and DeleteObject on this bucket and prefix",
    ClockSkew: "set this machine's clock: timedatectl set-ntp true",
    BucketNotFound: "correct spec.s3.bucket, or set spec.s3.create: true",
    WrongRegion: "correct spec.s3.region, or leave it out",
    Unreachable: "correct spec.s3.endpoint; check name, port, TLS, proxy and firewall",
    DeadlineExceeded: "correct spec.s3.endpoint; check name, port, TLS, proxy and firewall",
}


def store_checks(name: str, location: S3Location, *, read_only: bool) -> Iterator[Finding]:
    """Run the checks of one Datastore. The S3 adapter's deadlines bound each network call."""
    where = f"s3://{location.bucket}/{location.prefix} at {location.endpoint or 'AWS'}"
    try:
        seen = probe(location, deadline_s=PROBE_DEADLINE_S, writable=False)
    except BucketNotFound as error:
        if location.create:
            yield warn(name, f"{where}: the bucket does not exist yet", "nothing: the first mount creates it")
            return
        yield _failed(name, "read", error)
        return
    except DatastoreError as error:
        yield _failed(name, "read", error)
        return
    shown = " and shows attributes: a walk asks for no file" if seen.listed_metadata else ""
    yield ok(name, f"{where}: endpoint, credentials and bucket are right, listing works{shown}")
    if not read_only:
        yield from _check_writes(name, location)


def _check_writes(name: str, location: S3Location) -> Iterator[Finding]:
    key = f"{location.prefix}{OBJECT_NAME}{secrets.token_hex(8)}"
    action = "open"
    try:
        with closing(BlockingStore(open_s3(location))) as store:
            if _is_locked(store):
                yield warn(name, _LOCKED, _LOCK_ADVICE)
                return
            action = "put"
            store.put(key, b"written by datastore doctor; remove it\n", WriteOptions())
            action = "head"
            try:
                skew = check_skew(name, store, key)
            finally:
                action = "delete"
                store.delete(key)
    except DatastoreError as error:
        yield _failed(name, f"{action} {key}", error)
        return
    yield ok(name, "objects can be written, read and deleted")
    yield skew


def _is_locked(store: BlockingStore) -> bool:
    """Return whether the bucket has object lock; False where that can't be asked, or not with these keys."""
    try:
        return store.has_object_lock()
    except (AccessDenied, Unsupported):
        return False


def check_skew(name: str, store: BlockingStore, key: str) -> Finding:
    """Check how far this machine's clock is from the server's, to about a second."""
    before = time.time()
    server_s = store.head(key).server_time_ns / 1e9
    if not server_s:
        return ok(name, "the server does not tell its time")
    skew_s = (before + time.time()) / 2 - server_s
    side = "ahead of" if skew_s > 0 else "behind"
    text = f"this machine's clock is {format_roughly(skew_s)} {side} the server's"
    return warn(name, text, _ADVICE[ClockSkew]) if abs(skew_s) > MAX_SKEW_S else ok(name, text)


def _failed(name: str, action: str, error: DatastoreError) -> Finding:
    todo = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), "see the server's words")
    return bad(name, f"{action}: {error}", todo, exit_code_for(error))
