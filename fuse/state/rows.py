"""The rows of the state database (statedb.py) and of the log of young rows (youngrows.py)."""

from __future__ import annotations

from typing import NamedTuple, NewType

from ..store.base import UploadId
from .nodelog import NodeRecord

UploadNote = NewType("UploadNote", int)
_SECOND_NS = 1_000_000_000
NOWHERE = NodeRecord(0, 0, 0, "", b"")
"""The place of no node: no node has the number 0."""


class Unsent(NamedTuple):
    """One row of the table `unsent`, whose fields statedb.py explains; keys are text with surrogateescape."""

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
    """One row of the table `uploads`; note: its id."""

    note: UploadNote
    key: str
    upload_id: UploadId
    since_ns: int


class Subject(NamedTuple):
    """The subject of an intent: one version of the source, or else whatever was there before the intent was put off."""

    etag: str = ""
    """The version of the source; '' when unknown."""
    put_off_ns: int = 0
    """When the intent was put off (postponed, so that its names may be used again), by our clock; 0: never."""
    replaced: str = ""
    """The key of another object that the intent removes in the end, of version replaced_etag; '' for none."""
    replaced_etag: str = ""
    began_ns: int = 0
    """When the intent was begun, by the store's clock; 0 unknown, 1: the bytes of the source had not been sent then."""
    over: str | None = None
    """The version of the target when the intent was begun, '' for none; None: unknown."""

    def includes(self, etag: str, mtime_ns: int) -> bool:
        """Whether the intent is, or may be, about this version of an object. mtime_ns: its LastModified, compared with
        began_ns in whole seconds, because some answers of the store have no smaller unit."""
        if self.etag:
            return etag == self.etag
        if self.began_ns and self.put_off_ns:
            return mtime_ns // _SECOND_NS <= self.began_ns // _SECOND_NS
        return not self.put_off_ns or mtime_ns <= self.put_off_ns


class Intent(NamedTuple):
    """One row of the table `begun`: a change that must be finished. kind: 'rename-file', 'rename-directory', 'discard'
    or 'remove', the second half of a 'rename-file', whose `target` is the etag that the source had. move: the record of
    the node after a rename."""

    id: int
    kind: str
    source: str
    target: str
    move: NodeRecord = NOWHERE
    subject: Subject = Subject()
    request: int = 0
    """The kernel's request that began it (see ops.Caller); 0 unknown."""


def as_text(key: str | bytes) -> str:
    """Return the key that as_stored() was given."""
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def as_stored(key: str) -> str | bytes:
    """Return a key as the database has it: text (readable with the sqlite3 tool), or bytes if it is not UTF-8."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogateescape")
    return key
