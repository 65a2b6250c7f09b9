"""Finds out whether a version of an object is an earlier one with bytes appended (docs/SEMANTICS.md S-31, S-147)."""

from __future__ import annotations

import re
from hashlib import md5

from datastore.errors import NotFound, PreconditionFailed

from ...store.base import ObjectInfo, ObjectVersion
from . import facts
from .core import Core
from .nodes import Node

TAIL_CHECK = 65536
"""How many bytes before the old end must be unchanged for a larger object to count as appended to."""
DIGEST_CHECK = 8 << 20
"""The largest old version whose ETag, an MD5 after one unencrypted PUT, is compared where its end is not held here."""
UNREAD_CHECK = 256 << 20
"""The same limit for a reader that would get ESTALE otherwise; the check fetches bytes that are read next anyway."""
_MD5 = re.compile("[0-9a-f]{32}")
_TRIES = 4
"""How often the present version is requested while others keep writing it."""
_STEP = 32 << 20
"""How many bytes are fetched and hashed at once."""


async def grew(core: Core, old: ObjectVersion, new: ObjectVersion) -> bool:
    """Whether `new` is `old` with bytes appended; this fetches bytes of the new version. Errors: StoreError;
    PreconditionFailed or NotFound if the store does not have `new` any more.
    """
    start = max(0, old.size - TAIL_CHECK)
    held = core.reader.held(old, start, old.size)
    if held is None and old.size > DIGEST_CHECK:
        return False
    if held is None:
        return await _begins_with(core, new, old)
    return bytes(held) == await core.reader.fetch(new, start, old.size - start)


async def follow_unread(core: Core, node: Node, old: ObjectVersion) -> bool:
    """Move a node that lost its name to a newer version to that version, if it only grew and nobody has read a byte of
    the node (S-147); return whether the node has moved. Only the node's readers wait for this, no lister of the
    directory. old: the version that was to be read. The caller must not hold node.lock. Errors: StoreError.
    """
    if not 0 < old.size <= UNREAD_CHECK:
        return False
    async with node.lock:
        if node.version() != old:
            return True  # another reader has moved the node
        if node.pinned or not node.lost or node.staged is not None:
            return False
        info = await _grown(core, old)
        if info is None or node.pinned or not node.lost or node.version() != old:
            return False
        facts.replaced(core, node, info.etag, info.size, info.mtime_ns)
        if node.parent is not None and node.name not in node.parent.children:
            core.nodes.reattach(node)
        return True


async def _grown(core: Core, old: ObjectVersion) -> ObjectInfo | None:
    """Return what the store says of the present version, if that is `old` with bytes appended."""
    for _ in range(_TRIES):
        try:
            info = await core.store.head(old.key)
            new = ObjectVersion(old.key, info.etag, info.size)
            return info if new.size > old.size and await _begins_with(core, new, old) else None
        except PreconditionFailed:
            continue  # it was written again since the HEAD, as a log is
        except NotFound:
            break
    return None


async def _begins_with(core: Core, new: ObjectVersion, old: ObjectVersion) -> bool:
    """Whether the beginning of `new` has the MD5 that is the ETag of `old`; False if that ETag is no MD5."""
    if not _MD5.fullmatch(old.etag):
        return False
    digest = md5(usedforsecurity=False)
    for at in range(0, old.size, _STEP):
        body = await core.reader.fetch(new, at, min(_STEP, old.size - at))
        await core.loop.on_disk(digest.update, body)
    return digest.hexdigest() == old.etag
