"""Bringing a directory into the cache before it is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from datastore.errors import NotFound, StoreError
from datastore.units import format_count, format_size

from ..store.base import ObjectVersion
from .filesystem import DatastoreFilesystem
from .tree.nodes import Directory

_FILES_AT_ONCE = 8
"""Each file is fetched by several ranges; small ones need company to fill the line."""


def warm(
    filesystem: DatastoreFilesystem, path: str, progress: Callable[[dict[str, int | None]], None]
) -> dict[str, object]:
    """Fetch every file below `path` (relative to the mount, '' for all) into the cache, until it is full.

    progress is called with done_files, files, done_bytes and bytes. Returns {"ok", "files", "bytes", "errors"}.
    """
    cache = filesystem.core.cache
    prefix = _prefix_of(filesystem, path)
    versions = _versions_below(filesystem, prefix)
    total = sum(version.size for version in versions)
    done = {"files": 0, "bytes": 0}
    errors: list[str] = []
    lock = threading.Lock()
    full = threading.Event()
    _, left = cache.usage() if cache is not None else (0, 0)

    def report(files: int, size: int) -> None:
        with lock:
            done["files"] += files
            done["bytes"] += size
            progress({"done_files": done["files"], "files": len(versions), "done_bytes": done["bytes"], "bytes": total})

    def fetch(version: ObjectVersion) -> None:
        try:
            if not full.is_set() and not filesystem.core.reader.prefetch(version, lambda size: report(0, size)):
                full.set()
        except StoreError as error:
            with lock:
                errors.append(f"{version.key}: {error}")
        report(1, 0)

    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="warm") as pool:
        # Beyond the limit each file would only take the place of one that was fetched a moment ago.
        list(pool.map(fetch, [version for version in versions if (left := left - version.size) >= 0]))
    if cache is not None and (full.is_set() or left < 0):
        cache.recount()
    missing = [version for version in versions if cache is None or not cache.present(version)]
    if missing and cache is not None and not errors:
        size = format_size(sum(version.size for version in missing))
        used, most = cache.usage()
        why = f"{format_size(used)} of the {format_size(most)} that the cache can take there are used"
        errors.append(f"{format_count(len(missing), 'file')} of {len(versions):,}, {size}, did not fit: {why}")
    return {"ok": not errors, "files": len(versions), "bytes": total, "errors": errors[:20]}


def _prefix_of(filesystem: DatastoreFilesystem, path: str) -> str:
    """The key prefix (or key) of a path in the mount. NotFound."""
    node = filesystem.core.nodes.root
    for name in os.fsencode(path).split(b"/"):
        if name in (b"", b"."):
            continue
        child = filesystem.resolver.find(node, name)
        if child is None:
            raise NotFound(f"{path}: no such file or directory in this Datastore")
        if not isinstance(child, Directory):
            return child.key
        node = child
    return node.key


def _versions_below(filesystem: DatastoreFilesystem, prefix: str) -> list[ObjectVersion]:
    versions = []
    token: str | None = None
    while True:
        page = filesystem.core.store.list_page(prefix, token=token)
        versions += [
            ObjectVersion(found.key, found.etag, found.size)
            for found in page.objects
            if found.size and not found.key.endswith("/") and (prefix.endswith("/") or prefix in ("", found.key))
        ]
        token = page.next_token
        if token is None:
            return versions
