"""ETags as S3 computes them for most objects, to tell our own object from another client's. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

_MD5 = re.compile("[0-9a-f]{32}")


def etag_of(body: bytes | bytearray | memoryview) -> str:
    """Return the ETag of an object that was put whole: its MD5."""
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def joined_etag(parts: Iterable[str]) -> str:
    """Return the ETag of a multipart object: the MD5 of its parts' MD5s, and their number; '' if one is no MD5."""
    etags = list(parts)
    if not all(_MD5.fullmatch(etag) for etag in etags):
        return ""
    digests = b"".join(bytes.fromhex(etag) for etag in etags)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"
