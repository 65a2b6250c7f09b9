"""Metadata of an object as one short string: a listing of a large directory holds one for each entry. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_BREAK = "\n"
"""No HTTP header can hold it."""


def packed(metadata: Mapping[str, str], content_type: str) -> str | None:
    """Both in one string. None where a HEAD may show them otherwise: not printable ASCII, or not said at all.

    Servers encode what is not printable ASCII for the headers of a HEAD, each in its way (RFC 2047).
    """
    parts = [content_type]
    for name, value in metadata.items():
        parts += (name, value)
    said = _BREAK.join(parts)
    plain = said.isascii() and said.replace(_BREAK, "").isprintable() and said.count(_BREAK) == len(parts) - 1
    trimmed = all(value == value.strip() for value in parts)
    return said if content_type and plain and trimmed else None


def unpacked(said: str) -> tuple[dict[str, str], str]:
    """Metadata and content type of what packed() made."""
    content_type, *parts = said.split(_BREAK)
    return dict(zip(parts[::2], parts[1::2], strict=True)), content_type
