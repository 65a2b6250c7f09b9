"""Whether a version of an object is an earlier one with more at its end (docs/SEMANTICS.md S-31, S-147)."""

from __future__ import annotations

import re
from hashlib import md5

from datastore.errors import NotFound, PreconditionFailed

from ...store.base import ObjectVersion
from . import facts
from .core import Core
from .nodes import Node

TAIL_CHECK = 65536
"""Bytes before the old end that must be unchanged for a grown object to count as appended to."""
DIGEST_CHECK = 8 << 20
"""Up to this size an ETag that is an MD5 (of what came in one unencrypted PUT) tells when the old end is not held."""
UNREAD_CHECK = 256 << 20
"""The same for who would get an error otherwise: what he reads next is fetched with it."""
_MD5 = re.compile("[0-9a-f]{32}")
_STEP = 32 << 20
"""So much is in memory at once."""


async def grew(core: Core, old: ObjectVersion, new: ObjectVersion) -> bool:
    """Asks the store for the new version's bytes. StoreError."""
    start = max(0, old.size - TAIL_CHECK)
    held = core.reader.held(old, start, old.size)
    if held is None and old.size > DIGEST_CHECK:
        return False
    try:
        if held is None:
            return await _begins_with(core, new, old)
        return bytes(held) == await core.reader.fetch(new, start, old.size - start)
    except (PreconditionFailed, NotFound):
        return False


async def follow_unread(core: Core, node: Node, old: ObjectVersion) -> bool:
    """Whether a node of which nobody has read a byte, and that lost its name to another version, goes on with that:
    it only grew (S-147). Its own readers wait for that, and nobody who lists the directory. StoreError.
    old: the version that was to be read. node.lock is not held.
    """
    if not 0 < old.size <= UNREAD_CHECK:
        return False
    async with node.lock:
        if node.version() != old:
            return True  # another reader was here
        if node.pinned or not node.lost or node.staged is not None:
            return False
        try:
            info = await core.store.head(old.key)
            new = ObjectVersion(old.key, info.etag, info.size)
            if new.size <= old.size or not await _begins_with(core, new, old):
                return False
        except (PreconditionFailed, NotFound):
            return False
        if node.pinned or not node.lost or node.version() != old:
            return False
        facts.replaced(core, node, new.etag, new.size, info.mtime_ns)
        if node.parent is not None and node.name not in node.parent.children:
            core.nodes.reattach(node)
        return True


async def _begins_with(core: Core, new: ObjectVersion, old: ObjectVersion) -> bool:
    """Whether the beginning of a version has the ETag of an older one that came in one unencrypted PUT."""
    if not _MD5.fullmatch(old.etag):
        return False
    digest = md5(usedforsecurity=False)
    for at in range(0, old.size, _STEP):
        body = await core.reader.fetch(new, at, min(_STEP, old.size - at))
        await core.loop.on_disk(digest.update, body)
    return digest.hexdigest() == old.etag
