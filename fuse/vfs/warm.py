"""Fetches a directory into the disk cache before it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable

from datastore.errors import NotFound, StoreError
from datastore.units import format_count, format_size

from ..loop import each
from ..store.base import ObjectVersion
from .filesystem import DatastoreFilesystem
from .tree.core import Core
from .tree.nodes import Directory

_FILES_AT_ONCE = 8
"""How many files are fetched in parallel: a single one fills the line only if it is large enough for many ranges."""


async def warm(
    filesystem: DatastoreFilesystem, path: str, progress: Callable[[dict[str, int | None]], None]
) -> dict[str, object]:
    """Fetch every file below `path` (relative to the mount, '' for all) into the cache, until that is full.

    progress is called on the loop, with done_files, files, done_bytes and bytes.
    Returns {"ok", "files", "bytes", "errors"}.
    """
    core, cache = filesystem.core, filesystem.core.cache
    versions = await _versions_below(core, await _prefix_of(filesystem, path))
    total = sum(version.size for version in versions)
    done_files = done_bytes = 0
    errors: list[str] = []
    full = False
    _, left = await core.loop.on_disk(cache.usage)

    def report(files: int, size: int) -> None:
        nonlocal done_files, done_bytes
        done_files += files
        done_bytes += size
        progress({"done_files": done_files, "files": len(versions), "done_bytes": done_bytes, "bytes": total})

    # A file that does not fit any more would only evict a file that was fetched a moment ago.
    fitting = []
    for version in versions:
        if version.size <= left:
            fitting.append(version)
            left -= version.size
    waiting = iter(fitting)

    async def fetch(_: int) -> None:
        nonlocal full
        for version in waiting:
            try:
                if not full and not await core.reader.prefetch(version, lambda size: report(0, size)):
                    full = True
            except StoreError as error:
                errors.append(f"{version.key}: {error}")
            report(1, 0)

    await each(fetch, range(_FILES_AT_ONCE))
    if full or len(fitting) < len(versions):
        await core.loop.on_disk(cache.recount)
    missing = await core.loop.on_disk(lambda: [version for version in versions if not cache.present(version)])
    if missing and not errors:
        size = format_size(sum(version.size for version in missing))
        used, most = await core.loop.on_disk(cache.usage)
        why = f"{format_size(used)} of the {format_size(most)} that the cache can take there are used"
        errors.append(f"{format_count(len(missing), 'file')} of {len(versions):,}, {size}, did not fit: {why}")
    return {"ok": not errors, "files": len(versions), "bytes": total, "errors": errors[:20]}


async def _prefix_of(filesystem: DatastoreFilesystem, path: str) -> str:
    """Return the key of a file, or the key prefix of a directory, by its path in the mount. Errors: NotFound."""
    node = filesystem.core.nodes.root
    for name in os.fsencode(path).split(b"/"):
        if name in (b"", b"."):
            continue
        child = await filesystem.resolver.find(node, name)
        if child is None:
            raise NotFound(f"{path}: no such file or directory in this Datastore")
        if not isinstance(child, Directory):
            return child.key
        node = child
    return node.key


async def _versions_below(core: Core, prefix: str) -> list[ObjectVersion]:
    versions = []
    token: str | None = None
    while True:
        page = await core.store.list_page(prefix, token=token)
        versions += [
            ObjectVersion(found.key, found.etag, found.size)
            for found in page.objects
            if found.size and not found.key.endswith("/") and (prefix.endswith("/") or prefix in ("", found.key))
        ]
        token = page.next_token
        if token is None:
            return versions
