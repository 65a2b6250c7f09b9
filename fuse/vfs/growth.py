"""Whether a version of an object is an earlier one with more at its end (docs/SEMANTICS.md S-31, S-147)."""

from __future__ import annotations

import re
from hashlib import md5

from datastore.errors import NotFound, PreconditionFailed

from ..data.reader import Reader
from ..data.version import ObjectVersion

TAIL_CHECK = 65536
"""Bytes before the old end that must be unchanged for a grown object to count as appended to."""
DIGEST_CHECK = 8 << 20
"""Up to this size an ETag that is an MD5 (of what came in one unencrypted PUT) tells when the old end is not held."""
_MD5 = re.compile("[0-9a-f]{32}")


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
