"""Whether a version of an object is an earlier one with more at its end (docs/SEMANTICS.md S-31, S-147)."""

from __future__ import annotations

import re
from hashlib import md5
from itertools import pairwise

from datastore.errors import NotFound, PreconditionFailed

from ...data import multipart
from ...data.reader import Reader
from ...data.version import ObjectVersion
from ...store.etags import joined_etag
from .core import Core
from .nodes import Node

TAIL_CHECK = 65536
"""Bytes before the old end that must be unchanged for a grown object to count as appended to."""
DIGEST_CHECK = 8 << 20
"""Up to this size an ETag that is an MD5 (of what came in one unencrypted PUT) tells when the old end is not held."""
UNREAD_CHECK = multipart.COPY_MAX
"""The same for who would get an error otherwise: what he reads next is fetched with it."""
_MD5 = re.compile("[0-9a-f]{32}")
_OF_PARTS = re.compile("[0-9a-f]{32}-([0-9]{1,5})")
_STEP = 32 << 20
"""So much is in memory at once."""


def grew(reader: Reader, old: ObjectVersion, new: ObjectVersion) -> bool:
    """Asks the store for the new version's bytes. StoreError."""
    start = max(0, old.size - TAIL_CHECK)
    held = reader.held(old, start, old.size)
    if held is None and (old.size > DIGEST_CHECK or not _MD5.fullmatch(old.etag)):
        return False
    try:
        if held is not None:
            return bytes(held) == reader.fetch(new, start, old.size - start)
        return md5(reader.fetch(new, 0, old.size), usedforsecurity=False).hexdigest() == old.etag
    except (PreconditionFailed, NotFound):
        return False


def follow_unread(core: Core, node: Node, old: ObjectVersion) -> bool:
    """Whether a node of which nobody has read a byte, and that lost its name to another version, goes on with that:
    it only grew (S-147). Its own readers wait for that, and nobody who lists the directory. StoreError.

    old: the version that was to be read. node.lock is not held.
    """
    if not 0 < old.size <= UNREAD_CHECK:
        return False
    with node.lock:
        with core.lock:
            if node.version() != old:
                return True  # another reader was here
            if node.pinned or not node.lost or node.staged is not None:
                return False
        try:
            info = core.store.head(old.key)
            new = ObjectVersion(old.key, info.etag, info.size)
            if new.size <= old.size or not _begins_with(core.reader, new, old):
                return False
        except (PreconditionFailed, NotFound):
            return False
        with core.lock:
            if node.pinned or not node.lost or node.version() != old:
                return False
            node.etag, node.size, node.mtime_ns, node.exact = new.etag, new.size, info.mtime_ns, False
            core.opens.moved_on(node.ino, new.etag, new.size)
            if node.parent is not None and node.name not in node.parent.children:
                core.nodes.reattach(node)
            core.notifier.inval_inode(node.ino)
        return True


def _begins_with(reader: Reader, new: ObjectVersion, old: ObjectVersion) -> bool:
    """Whether the beginning of a version has the ETag of an older one, as servers make it of one PUT or of parts."""
    cuts = _cuts(old)
    digests = []
    for start, stop in pairwise(cuts):
        digest = md5(usedforsecurity=False)
        for at in range(start, stop, _STEP):
            digest.update(reader.fetch(new, at, min(_STEP, stop - at)))
        digests.append(digest.hexdigest())
    return old.etag in (digests[0] if len(digests) == 1 else "", joined_etag(digests)) if digests else False


def _cuts(version: ObjectVersion) -> list[int]:
    """Where the parts of an object are likely to begin and end: 8 MiB each, as most tools and we ourselves send them,
    or the first of more, which we copied when something was appended. Empty when its ETag tells nothing.
    """
    of_parts = _OF_PARTS.fullmatch(version.etag)
    if of_parts is None:
        return [0, version.size] if _MD5.fullmatch(version.etag) else []
    step = multipart.PART_SIZE
    first = -(-version.size // step) - int(of_parts[1]) + 1
    return [0, *range(first * step, version.size, step), version.size] if first > 0 else []
