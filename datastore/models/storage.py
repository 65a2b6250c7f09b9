"""What a store of models has to offer: documents that change by compare-and-swap, and trees of files.

Paths are text, relative to the root of the store, with '/' between names. Two kinds of storage implement this: a prefix
of a bucket (objects.py), by conditional requests, and a mounted directory (directory.py), by exclusive creation and
rename. All calls are synchronous, safe to call from many threads and bounded by the deadlines of what is beneath;
Errors: StoreError, of which NotFound, AlreadyExists and PreconditionFailed mean what they do of objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, NewType, Protocol, Self

from datastore.models.errors import VersionDamaged
from datastore.models.manifest import Entry, Kind

Tag = NewType("Tag", str)
"""One state of a document; another after each change."""

Body = bytes | bytearray | memoryview

CHUNK_BYTES = 8 << 20
"""Of a file, so much is read and sent at once. S3 takes parts of 5 MiB and more."""
MAX_PARTS = 10_000


def chunk_bytes(size: int) -> int:
    """How a file of this size is cut: into chunks of 8 MiB, larger ones where there would be more than S3 takes."""
    least = -(-size // MAX_PARTS)
    return max(CHUNK_BYTES, -(-least // (1 << 20)) << 20)


class Document(NamedTuple):
    """A small file that several writers may change."""

    body: bytes
    tag: Tag


class Name(NamedTuple):
    """Something in a directory of the storage."""

    name: str
    is_directory: bool


class Node(NamedTuple):
    """One path of a tree, as a scan finds it."""

    path: str
    kind: Kind
    size: int = 0
    mode: int | None = None
    """Permission bits; None: only reading the file shows them."""
    target: str = ""
    """Of a symlink."""
    at: str = ""
    """What the tree reads for it: the path, unless the file is stored in place of a link to it."""
    state: str = ""
    """Differs when the content does: an ETag, or the times and numbers of stat(2)."""


class Piece(NamedTuple):
    """Bytes of a file, and its mode with the type bits as far as its tree knows them."""

    body: Body
    mode: int


class Sink(Protocol):
    """Takes one file in chunks of chunk_bytes(size), in order.

    When its block ends without an error the file is there, and durable; with one nothing of it is.
    """

    state: str
    """Of the file, once it is there: see Node.state."""

    def write(self, chunk: Body) -> None:
        """The next chunk; its bytes must not change until the end of the block."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ReadableTree(Protocol):
    """A directory with all that is below it, to be read."""

    @property
    def location(self) -> str:
        """Where it is, for people: a URL or an absolute path."""
        ...

    def scan(self) -> list[Node]:
        """Every path below, parents first. Errors: SourceInvalid for what a version can't hold; NotFound."""
        ...

    def read(self, node: Node, start: int, stop: int) -> Piece:
        """Bytes [start, stop) of a file. Errors: SourceChanged when it is not as the scan found it; NotFound."""
        ...


class Tree(ReadableTree, Protocol):
    """The same, to be written as well: by one process, once."""

    def begin(self) -> None:
        """Make the directory itself, before anything is written."""
        ...

    def write(self, path: str, mode: int, size: int) -> Sink:
        """For a new file whose directory was made."""
        ...

    def make(self, entry: Entry, *, bare: bool) -> None:
        """A new directory or symlink. bare: a directory in which nothing will be."""
        ...

    def copy(self, source: ReadableTree, node: Node, path: str, mode: int) -> str | None:
        """A new file, copied by the server from the state that was scanned: its state here. None: it can't.

        Errors: SourceChanged.
        """
        ...

    def adopt(self, tree: Tree, entry: Entry, state: str) -> str | None:
        """A new file, taken over from a tree of this storage where it is in that state: its state here. None: it can't.

        It may be gone from there afterwards.
        """
        ...

    def reaches(self, source: ReadableTree, node: Node) -> bool:
        """Whether copy() works for the files of a tree, tried with one of them where only that tells."""
        ...

    def settle(self, entries: Sequence[Entry]) -> None:
        """Make the names durable, and see that these entries and nothing else are here. Errors: VersionDamaged."""
        ...

    def is_quiet(self) -> bool:
        """Whether every write so far was answered: then none of them can take effect later."""
        ...

    def discard(self, path: str) -> None:
        """Remove one file; success when it is not there."""
        ...

    def remove(self) -> int:
        """Remove all of it, with uploads under way; how many files and uploads went. Repeated: what is left."""
        ...


class Storage(Protocol):
    """The root of a store of models."""

    @property
    def location(self) -> str:
        """Where it is, for people."""
        ...

    def check(self) -> None:
        """Errors: Unsupported where it is known that documents can't be compared and swapped here."""
        ...

    def read(self, path: str, limit: int | None = None) -> Document:
        """A document, or its first `limit` bytes. Errors: NotFound."""
        ...

    def age_s(self, path: str) -> float:
        """Seconds since a document was written, by the storage's own clock. Errors: NotFound."""
        ...

    def create(self, path: str, body: bytes) -> Tag:
        """A new document. Errors: AlreadyExists."""
        ...

    def replace(self, path: str, body: bytes, tag: Tag) -> Tag:
        """Another content, if the document is still in this state. Errors: PreconditionFailed, also if it is gone."""
        ...

    def remove(self, path: str) -> None:
        """Remove a document; success when it was not there."""
        ...

    def names(self, path: str) -> list[Name]:
        """What is directly in a directory, in no order; nothing where there is none."""
        ...

    def tree(self, path: str) -> Tree:
        """The tree at a path, there or not."""
        ...

    def sweep(self, path: str) -> int:
        """Remove what interrupted writers of documents left directly in a directory; how many files that were."""
        ...

    def close(self) -> None:
        """Release connections; idempotent."""
        ...


def leads_inside(path: str, target: str) -> bool:
    """Whether a relative link at a path of a tree stays in the tree, by its words alone."""
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


def differences(where: str, entries: Sequence[Entry], nodes: Sequence[Node]) -> Iterator[str]:
    """How what is there differs from the entries, as far as a scan shows; each for people."""
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
        elif entry.kind == "directory" and node.mode not in (None, entry.mode):
            yield f"{at}: has mode {node.mode:04o} now, and was saved with {entry.mode:04o}"
    for path in found:
        yield f"{where}/{path}: was not saved, somebody else put it there"


def compare(where: str, entries: Sequence[Entry], nodes: Sequence[Node]) -> None:
    """Errors: VersionDamaged, for the first difference."""
    for difference in differences(where, entries, nodes):
        raise VersionDamaged(difference)
