"""What the state database and the log of young rows say of a file whose bytes are not all in the store."""

from __future__ import annotations

from typing import NamedTuple


class Unsent(NamedTuple):
    """One row of `unsent`; keys are text with surrogateescape. The fields: see the schema in statedb.py."""

    staging: str
    key: str
    base_key: str
    base_etag: str
    base_length: int
    base_size: int
    metadata: dict[str, str]
    content_type: str
    since_ns: int
    error: str = ""
    expects: str | None = None
    stuck: bool = False


def as_text(key: str | bytes) -> str:
    """What as_stored() was given."""
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def as_stored(key: str) -> str | bytes:
    """Text where it is text (readable with the sqlite3 tool), bytes where it is not UTF-8."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogateescape")
    return key
