"""S3's own limits that are checked before anything is sent: not every server refuses what is beyond them. Pure.

Source: Amazon S3 user guide, "Naming Amazon S3 objects" and "Working with object metadata".
"""

from __future__ import annotations

from collections.abc import Mapping

from datastore.errors import InvalidKey, KeyTooLong, MetadataTooLarge

from .base import user_metadata

MAX_KEY_BYTES = 1024
MAX_METADATA_BYTES = 2048


def key_bytes(key: str) -> bytes:
    """Return the exact bytes of a key."""
    return key.encode("utf-8", "surrogateescape")


def shown(key: str) -> str:
    """Return a key for an error message: on one line, all characters printable."""
    return key_bytes(key).decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")


def check_key(key: str) -> None:
    """Errors: KeyTooLong, InvalidKey (an empty key, whose request would be one for the bucket)."""
    raw = key_bytes(key)
    if not raw:
        raise InvalidKey("an object needs a name: the key is empty", key=key)
    if len(raw) > MAX_KEY_BYTES:
        raise KeyTooLong(
            f"{shown(key)[:80]}...: the key has {len(raw)} bytes, S3 takes {MAX_KEY_BYTES}: shorten the path", key=key
        )


def check_metadata(key: str, metadata: Mapping[str, str]) -> None:
    """Errors: MetadataTooLarge."""
    kept = user_metadata(metadata)
    size = len("".join((*kept, *kept.values())))
    if size > MAX_METADATA_BYTES:
        raise MetadataTooLarge(f"{shown(key)}: {size} bytes of user metadata, S3 takes {MAX_METADATA_BYTES}", key=key)
