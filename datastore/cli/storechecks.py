"""Checks of whether a Datastore's storage can be used from here: endpoint, credentials, bucket, permissions, clocks.

They write one small object and remove it, but only if the Datastore is writable and the bucket has no object lock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing

from datastore.api.source import S3Location
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.findings import Finding, bad, ok, warn
from datastore.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    ClockSkew,
    CredentialsInvalid,
    DatastoreError,
    DeadlineExceeded,
    ObjectLocked,
    PreconditionFailed,
    StoreError,
    Unreachable,
    Unsupported,
    WrongRegion,
)
from datastore.fuse.store.base import ETag, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3 import open_s3, probe
from datastore.units import format_roughly

PROBE_DEADLINE_S = 5.0
MAX_SKEW_S = 60.0
"""Servers refuse a skew of 15 minutes; a minute already makes the times of files misleading."""
OBJECT_NAME = ".datastore-doctor-"
_BODY = b"written by datastore doctor; remove it\n"

_LOCKED = (
    "the bucket has object lock: what that keeps can't be replaced or removed, such calls fail with EPERM; nothing is "
    "written to try"
)
_LOCK_ADVICE = "mount it readOnly, or use a bucket without object lock"
_CONFLICT_ADVICE = "remove spec.conflict, and let only one client at a time write to a file; or use another server"
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


def store_checks(name: str, location: S3Location, *, read_only: bool, conflict_fails: bool) -> Iterator[Finding]:
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
        yield from _check_writes(name, location, conflict_fails)


def _check_writes(name: str, location: S3Location, conflict_fails: bool) -> Iterator[Finding]:
    key = f"{location.prefix}{OBJECT_NAME}{secrets.token_hex(8)}"
    try:
        with closing(BlockingStore(open_s3(location))) as store:
            if _is_locked(store):
                yield warn(name, _LOCKED, _LOCK_ADVICE)
            else:
                yield from _check_object(name, store, key, conflict_fails)
    except DatastoreError as error:
        yield _failed(name, "open", error)


def _check_object(name: str, store: BlockingStore, key: str, conflict_fails: bool) -> list[Finding]:
    """Write an object, try on it what a mount does, and remove it, also after Ctrl-C."""
    found, failed = [], []
    action, written = "put", True
    try:
        store.put(key, _BODY, WriteOptions())
        action = "head"
        found.append(check_skew(name, store, key))
        action = "conditional put"
        found.append(_check_conditions(name, store, key, conflict_fails))
    except StoreError as error:
        written = action != "put" or error.transient  # after no answer it may be there
        failed.append(_failed(name, f"{action} {key}", error))
    finally:
        try:
            if written:
                store.delete(key)
        except StoreError as error:
            failed.append(_failed(name, f"delete {key}, which may be left in the bucket", error))
    return [*(failed or [ok(name, "objects can be written, read and deleted")]), *found]


def _check_conditions(name: str, store: BlockingStore, key: str, conflict_fails: bool) -> Finding:
    """Check that the server keeps an object that a conditional PUT must not replace."""
    forbidden = {"If-None-Match": WriteOptions(if_none_match=True), "If-Match": WriteOptions(if_match=ETag("0" * 32))}
    ignored = []
    for header, options in forbidden.items():
        try:
            store.put(key, _BODY, options)
        except (AlreadyExists, PreconditionFailed):
            continue
        except Unsupported:
            pass
        ignored.append(header)
    if not ignored:
        return ok(name, "no client replaces unseen what another one wrote: conditional PUTs work")
    text = (
        f"the server does not honour {' and '.join(ignored)} of a PUT: of clients that write to one file, the last "
        "close wins, and O_EXCL excludes no other client"
    )
    if conflict_fails:
        return bad(name, f"{text}, so conflict: fail can't work", _CONFLICT_ADVICE, ExitCode.STORAGE)
    return warn(name, text, "let only one client at a time write to a file")


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
