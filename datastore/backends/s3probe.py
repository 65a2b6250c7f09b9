"""Finds out the capabilities of a directory in a bucket, with a few small objects under names that nobody else uses.

Each trial does what a mount does (docs/SEMANTICS.md): a symbolic link is an object with a longer name, an empty
directory is an object whose key ends with '/', chmod and rename are copies on the server. Hard links and atomic renames
don't exist with objects (S-10, S-26).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

from datastore.api.status import Capabilities
from datastore.errors import AccessDenied, CredentialsInvalid, StoreError
from datastore.fuse.store.base import ByteRange, WriteOptions
from datastore.fuse.store.blocking import BlockingStore

PROBE = ".datastore.probe-"


def capabilities(store: BlockingStore, prefix: str) -> Capabilities:
    """Return what works. Errors: any of the first write; AccessDenied, CredentialsInvalid, transient StoreErrors."""
    base = f"{prefix}{PROBE}{secrets.token_hex(8)}"
    directory, plain = f"{base}/", f"{base}/a"
    # All are deleted, whether they were written or not: the name is new, so nobody else has them.
    written = [directory, plain, f"{plain}.rclonelink", f"{base}/b"]
    try:
        # The first write shows whether writing is allowed at all; the caller gets its error.
        store.put(directory, b"", WriteOptions(content_type="application/x-directory"))
        return Capabilities.model_validate(
            {
                "emptyDirs": _works(lambda: _listed(store, directory)),
                "symlinks": _works(lambda: _kept(store, f"{plain}.rclonelink", b"a")),
                "append": _works(lambda: _kept(store, plain, b"one") and _kept(store, plain, b"one and two")),
                "rename": _works(lambda: _copied(store, plain, f"{base}/b")),
                "chmod": _works(lambda: _annotated(store, plain)),
                "hardlinks": False,
                "atomicRename": False,
            }
        )
    finally:
        with suppress(StoreError):
            store.delete_many(written)


def _works(trial: Callable[[], bool]) -> bool:
    """Return whether the trial succeeds. Missing rights and transient errors are no answer, so they are raised."""
    try:
        return trial()
    except (AccessDenied, CredentialsInvalid):
        raise
    except StoreError as error:
        if error.transient:
            raise
        return False


def _listed(store: BlockingStore, key: str) -> bool:
    return any(each.key == key for each in store.list_page(key, max_keys=2).objects)


def _kept(store: BlockingStore, key: str, body: bytes) -> bool:
    store.put(key, body, WriteOptions())
    return bytes(store.get(key, byte_range=ByteRange(0, 2 * len(body)))[0]) == body


def _copied(store: BlockingStore, source: str, target: str) -> bool:
    store.copy(source, target)
    return store.head(target).size == store.head(source).size


def _annotated(store: BlockingStore, key: str) -> bool:
    store.copy(key, key, replace=WriteOptions(metadata={"mode": "33152"}))
    return store.head(key).metadata.get("mode") == "33152"
