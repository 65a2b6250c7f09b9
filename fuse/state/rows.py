"""What the state database and the log of young rows say: of unsent files, of what was begun."""

from __future__ import annotations

from typing import NamedTuple, NewType

from ..store.base import UploadId
from .nodelog import NodeRecord

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


class Subject(NamedTuple):
    """What an intent is about: one version of the source, or what was there before it was put off."""

    etag: str = ""
    """That version; '' unknown."""
    put_off_ns: int = 0
    """When, by our clock; 0: never."""
    replaced: str = ""
    """An object that goes in the end, of the version replaced_etag; '' for none."""
    replaced_etag: str = ""
    began_ns: int = 0
    """By the store's clock: what is older was there when it was begun; 0 unknown."""
    over: str | None = None
    """The version of the target then, '' for none; None: unknown."""

    def includes(self, etag: str, mtime_ns: int) -> bool:
        """Whether this version of an object is meant, or could be; mtime_ns: its LastModified.

        Times are compared by the store's clock, of which some answers tell whole seconds only.
        """
        if self.etag:
            return etag == self.etag
        if self.began_ns and self.put_off_ns:
            return mtime_ns // _SECOND_NS <= self.began_ns // _SECOND_NS
        return not self.put_off_ns or mtime_ns <= self.put_off_ns


class Intent(NamedTuple):
    """One row of `begun`: what must be finished. kind: 'rename-file', 'rename-directory', 'discard', or 'remove' (the
    second half of a 'rename-file': target is the version of the source then). move: where a rename puts its node.
    """

    id: int
    kind: str
    source: str
    target: str
    move: NodeRecord | None = None
    subject: Subject = Subject()


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
