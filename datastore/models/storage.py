"""The interface of a store of models: documents that are changed by compare-and-swap, and trees of files.

Paths are text, relative to the root of the store, with '/' between names. Two kinds of storage implement this: a prefix
of a bucket (objects.py), by conditional requests, and a mounted directory (directory.py), by exclusive creation and
rename. All calls are synchronous, safe to call from many threads, and bounded by the deadlines of the bucket or mount.
Errors: StoreError; NotFound, AlreadyExists and PreconditionFailed mean the same as for objects.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, NewType, Protocol, Self

from datastore.models.errors import VersionDamaged
from datastore.models.manifest import Entry, Kind

Tag = NewType("Tag", str)
"""Identifies one state of a document; a changed document has another tag."""

Body = bytes | bytearray | memoryview

CHUNK_BYTES = 8 << 20
"""How many bytes of a file are read and sent at once. S3 takes parts of 5 MiB and more."""
MAX_PARTS = 10_000
_MAX_LINKS = 40
"""The most links that are followed for one path, as in the kernel (path_resolution(7)), which then refuses the path."""


def chunk_bytes(size: int) -> int:
    """Return the chunk size for a file of this size: 8 MiB, or more where 8 MiB would make more parts than S3 takes."""
    least = -(-size // MAX_PARTS)
    return max(CHUNK_BYTES, -(-least // (1 << 20)) << 20)


class Document(NamedTuple):
    """The content and the state of a small file that several writers may change."""

    body: bytes
    tag: Tag


class Name(NamedTuple):
    """A name in a directory of the storage."""

    name: str
    is_directory: bool


class Node(NamedTuple):
    """One path of a tree, as a scan found it."""

    path: str
    kind: Kind
    size: int = 0
    mode: int | None = None
    """Permission bits; None when only reading the file shows them."""
    target: str = ""
    """The target of a symlink."""
    at: str = ""
    """Where the tree reads the file (a path, key or offset); not at `path` when the file stands in for a link to it."""
    state: str = ""
    """Differs when the content does: an ETag, or the size and the times of stat(2)."""


class Piece(NamedTuple):
    """Bytes of a file, and the file's mode, with the type bits as far as the tree knows them."""

    body: Body
    mode: int


class Sink(Protocol):
    """A context manager that takes one file in chunks of chunk_bytes(size), in order.

    When the block ends without an error, the file exists and is durable; after an error nothing of the file exists.
    """

    state: str
    """The file's state, once the file exists: see Node.state."""

    def write(self, chunk: Body) -> None:
        """Take the next chunk, whose bytes must not change until the end of the block."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ReadableTree(Protocol):
    """A directory and everything below it, for reading."""

    @property
    def location(self) -> str:
        """Where the tree is, for people: a URL or an absolute path."""
        ...

    def scan(self) -> list[Node]:
        """Return every path below, parents first. Errors: SourceInvalid for what a version can't hold; NotFound."""
        ...

    def read(self, node: Node, start: int, stop: int) -> Piece:
        """Read bytes [start, stop) of a file. Errors: SourceChanged when it is not as the scan found it; NotFound."""
        ...


class Tree(ReadableTree, Protocol):
    """A tree that can be written as well, once and by one process only."""

    def begin(self) -> None:
        """Make the directory itself, before anything is written."""
        ...

    def write(self, path: str, mode: int, size: int) -> Sink:
        """Return the sink for a new file, whose directory must exist."""
        ...

    def make(self, entry: Entry, *, bare: bool) -> None:
        """Make a new directory or symlink. bare: whether nothing will be in the directory."""
        ...

    def copy(self, source: ReadableTree, node: Node, path: str, mode: int) -> str | None:
        """Let the server copy a scanned file; return the copy's state, or None if it can't. Errors: SourceChanged."""
        ...

    def adopt(self, tree: Tree, entry: Entry, state: str) -> str | None:
        """Move or copy a file from a tree of this storage if it has this state; return its new state, else None."""
        ...

    def reaches(self, source: ReadableTree, node: Node) -> bool:
        """Return whether copy() works for the files of a tree, by a trial with `node` when only a trial can tell."""
        ...

    def settle(self, entries: Sequence[Entry]) -> None:
        """Make the names durable, and check that the tree has exactly these entries. Errors: VersionDamaged."""
        ...

    def is_quiet(self) -> bool:
        """Return whether every write so far was answered, so that none of them can take effect later."""
        ...

    def discard(self, path: str) -> None:
        """Remove one file; success when it does not exist."""
        ...

    def remove(self) -> int:
        """Remove the whole tree, with uploads under way; return how many files and uploads went. May be repeated."""
        ...


class Storage(Protocol):
    """The root of a store of models."""

    @property
    def location(self) -> str:
        """Where the store is, for people."""
        ...

    def check(self) -> None:
        """Errors: Unsupported when documents are known not to support compare-and-swap here."""
        ...

    def read(self, path: str, limit: int | None = None) -> Document:
        """Read a document, or its first `limit` bytes. Errors: NotFound."""
        ...

    def age_s(self, path: str) -> float:
        """Return the seconds since a document was written, by the storage's own clock. Errors: NotFound."""
        ...

    def create(self, path: str, body: bytes) -> Tag:
        """Make a new document. Errors: AlreadyExists."""
        ...

    def replace(self, path: str, body: bytes, tag: Tag) -> Tag:
        """Replace the content if the document still has this tag. Errors: PreconditionFailed, also if it is gone."""
        ...

    def remove(self, path: str) -> None:
        """Remove a document; success when it does not exist."""
        ...

    def names(self, path: str) -> list[Name]:
        """Return the entries of a directory, in no order; nothing when there is no such directory."""
        ...

    def tree(self, path: str) -> Tree:
        """Return the tree at a path, which need not exist."""
        ...

    def sweep(self, path: str) -> int:
        """Remove what interrupted writers of documents left directly in a directory; return how many files went."""
        ...


def leads_inside(path: str, target: str) -> bool:
    """Return whether a link at a path of a tree stays in the tree, judged by its text alone."""
    if target.startswith("/"):
        return False
    depth = path.count("/")
    for name in target.split("/"):
        if name == "..":
            depth -= 1
        elif name not in ("", "."):
            depth += 1
        if depth < 0:
            return False
    return True


def leads_out(links: Mapping[str, str]) -> str:
    """Return the path of a link that leads out of its tree, by itself or through others; '' if none does. links: the
    targets of all links of a tree, by path."""
    for path in links:
        at: list[str] = []
        ahead, followed = path.split("/")[::-1], 0
        while ahead and followed <= _MAX_LINKS:
            name = ahead.pop()
            target = links.get("/".join([*at, name]))
            if target is not None:
                if target.startswith("/"):
                    return path
                ahead += target.split("/")[::-1]
                followed += 1
            elif name == "..":
                if not at:
                    return path
                at.pop()
            elif name not in ("", "."):
                at.append(name)
    return ""


def has_mode(entry: Entry, found: int) -> bool:
    """Return whether a file or directory has the mode with which it was saved.

    For pods with an fsGroup, the group is shown with the owner's rights (S-83), on a disk also for good.
    """
    in_group = entry.mode | (entry.mode & stat.S_IRWXU) >> 3 | (stat.S_ISGID if entry.kind == "directory" else 0)
    return found in (entry.mode, in_group)


def differences(where: str, entries: Sequence[Entry], nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a text for people for each difference between the entries and what a scan found."""
    found = {node.path: node for node in nodes}
    for entry in entries:
        at = f"{where}/{entry.path}"
        node = found.pop(entry.path, None)
        if node is None:
            yield f"{at}: is missing"
            continue
        size = len(entry.target.encode()) if entry.kind == "symlink" else entry.size
        written_as_file = entry.kind == "symlink" and node.kind == "file" and node.size == size
        if node.kind != entry.kind:
            if not written_as_file:
                yield f"{at}: is a {node.kind} now, and was saved as a {entry.kind}"
        elif entry.kind == "file" and node.size != entry.size:
            yield f"{at}: has {node.size:,} bytes now, and was saved with {entry.size:,} and sha256 {entry.sha256}"
        elif node.target != entry.target:
            yield f"{at}: leads to {node.target} now, and was saved as a link to {entry.target}"
        elif entry.kind == "directory" and node.mode is not None and not has_mode(entry, node.mode):
            yield f"{at}: has mode {node.mode:04o} now, and was saved with {entry.mode:04o}"
    for path in found:
        yield f"{where}/{path}: was not saved, somebody else put it there"


def compare(where: str, entries: Sequence[Entry], nodes: Sequence[Node]) -> None:
    """Errors: VersionDamaged for the first difference between the entries and what a scan found."""
    for difference in differences(where, entries, nodes):
        raise VersionDamaged(difference)
