"""An object's metadata as one short string, since the listing of a large directory keeps many of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_BREAK = "\n"
"""Separates the values; no HTTP header can contain it."""


def packed(metadata: Mapping[str, str], content_type: str) -> str | None:
    """Return both as one string; None if a HEAD may differ: text that is not trimmed printable ASCII, or no type.
    In the headers of a HEAD each server encodes text that is not printable ASCII in its own way (RFC 2047)."""
    parts = [content_type]
    for name, value in metadata.items():
        parts += (name, value)
    said = _BREAK.join(parts)
    plain = said.isascii() and said.replace(_BREAK, "").isprintable() and said.count(_BREAK) == len(parts) - 1
    trimmed = all(value == value.strip() for value in parts)
    return said if content_type and plain and trimmed else None


def unpacked(said: str) -> tuple[dict[str, str], str]:
    """Return the metadata and the content type of which packed() made a string."""
    content_type, *parts = said.split(_BREAK)
    return dict(zip(parts[::2], parts[1::2], strict=True)), content_type
