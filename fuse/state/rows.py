"""What the state database and the log of young rows say: of unsent files, of what was begun."""

from __future__ import annotations

from typing import NamedTuple, NewType

from ..store.base import UploadId

IntentId = NewType("IntentId", int)
UploadNote = NewType("UploadNote", int)
_SECOND_NS = 1_000_000_000


class Unsent(NamedTuple):
    """One row of `unsent`; keys are text with surrogateescape. The fields: see statedb.py."""

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
    unsynced: bool = False


class NotedUpload(NamedTuple):
    """One row of `uploads`."""

    note: UploadNote
    key: str
    upload_id: UploadId
    since_ns: int


class Intent(NamedTuple):
    """One row of `intents`."""

    id: IntentId
    kind: str
    source: str
    target: str


class Subject(NamedTuple):
    """One row of `subjects`; see statedb.py."""

    etag: str = ""
    put_off_ns: int = 0
    replaced: str = ""
    replaced_etag: str = ""
    began_ns: int = 0
    over: str | None = None

    def includes(self, etag: str, mtime_ns: int) -> bool:
        """Whether this version of an object is meant, or could be; mtime_ns: its LastModified.

        Times are compared by the store's clock, of which some answers tell whole seconds only.
        """
        if self.etag:
            return etag == self.etag
        if self.began_ns and self.put_off_ns:
            return mtime_ns // _SECOND_NS <= self.began_ns // _SECOND_NS
        return not self.put_off_ns or mtime_ns <= self.put_off_ns


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
