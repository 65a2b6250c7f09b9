"""S3's own limits, checked before anything is sent, so that every adapter refuses the same things in the same words.

Pure. Source: Amazon S3 user guide, "Naming Amazon S3 objects" and "Working with object metadata".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from datastore.errors import InvalidKey, InvalidRequest, KeyTooLong, MetadataTooLarge

from .base import SYSTEM, WriteOptions

MAX_KEY_BYTES = 1024
MAX_METADATA_BYTES = 2048
MAX_PART_NUMBER = 10_000
MAX_KEYS = 1000
"""The most keys in one call, or on one page of a listing."""


def key_bytes(key: str) -> bytes:
    """Return the exact bytes of a key."""
    return key.encode("utf-8", "surrogateescape")


def shown(key: str) -> str:
    """Return a key for an error message: on one line, all characters printable."""
    return key_bytes(key).decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")


def check_key(key: str) -> None:
    """Errors: KeyTooLong, InvalidKey (an empty key)."""
    raw = key_bytes(key)
    if not raw:
        raise InvalidKey("an object needs a name: the key is empty", key=key)
    if len(raw) > MAX_KEY_BYTES:
        raise KeyTooLong(
            f"{shown(key)[:80]}...: the key has {len(raw)} bytes, S3 takes {MAX_KEY_BYTES}: shorten the path", key=key
        )


def check_options(key: str, options: WriteOptions) -> None:
    """Errors: MetadataTooLarge, InvalidRequest (two conditions at once, or metadata that is not printable ASCII)."""
    if options.if_none_match and options.if_match is not None:
        raise InvalidRequest(f"{shown(key)}: if_none_match and if_match exclude each other", key=key)
    check_metadata(key, options.metadata)


def check_metadata(key: str, metadata: Mapping[str, str]) -> None:
    """Errors: MetadataTooLarge, InvalidRequest."""
    size = 0
    for name, value in metadata.items():
        if not _is_name(name):
            raise InvalidRequest(f"{shown(key)}: metadata name {name!r} is not lower-case ASCII", key=key)
        if not (value.isascii() and (value.isprintable() or not value) and value == value.strip()):
            raise InvalidRequest(f"{shown(key)}: the value of metadata {name!r} is not printable ASCII", key=key)
        if not name.startswith(SYSTEM):
            size += len(name) + len(value)
    if size > MAX_METADATA_BYTES:
        raise MetadataTooLarge(f"{shown(key)}: {size} bytes of user metadata, S3 takes {MAX_METADATA_BYTES}", key=key)


@lru_cache(maxsize=256)
def _is_name(name: str) -> bool:
    return name.isascii() and name.isprintable() and name == name.lower() and " " not in name and name != ""


def check_count(keys: Sequence[object]) -> None:
    """Errors: InvalidRequest when one call has more than MAX_KEYS keys."""
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"{len(keys)} keys in one call, at most {MAX_KEYS} are taken")


def check_part_number(key: str, number: int) -> None:
    """Errors: InvalidRequest."""
    if not 1 <= number <= MAX_PART_NUMBER:
        raise InvalidRequest(f"{shown(key)}: part number {number} is not in 1..{MAX_PART_NUMBER}", key=key)
