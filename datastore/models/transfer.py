"""Transfer files between trees: each is read once, in chunks and several at a time, for its digest and its copy."""

from __future__ import annotations

import hashlib
import stat
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from typing import NamedTuple, TypeVar

from datastore.models.errors import SourceInvalid, VersionDamaged
from datastore.models.manifest import Entry
from datastore.models.progress import Progress
from datastore.models.storage import Body, Node, Piece, ReadableTree, Tree, chunk_bytes, has_mode

T = TypeVar("T")

FILES_AT_ONCE = 16
READS_AT_ONCE = 16
"""The most chunks of 8 MiB in memory: 128 MiB, and as much again that waits to be sent (objects.UPLOADS_AT_ONCE)."""
AHEAD = 8
"""How many chunks are requested ahead: 800 MB/s with a latency of 20 ms and 100 MB/s for each request."""


class Budget:
    """Limits how many chunks all callers together have in memory. Any thread may use it.

    A caller without a chunk waits for one. A caller with chunks gets more only if some are free, and never waits.
    """

    def __init__(self, chunks: int) -> None:
        self._left = threading.BoundedSemaphore(chunks)

    def take(self, *, first: bool) -> bool:
        """Take a place for a chunk; return whether one was free. first: the caller holds none, and waits for one."""
        return self._left.acquire(blocking=first)

    def give(self) -> None:
        """Give the place of a chunk back."""
        self._left.release()


class Moved(NamedTuple):
    """A file that was read. state: the state of its copy; '' when no copy was made."""

    node: Node
    entry: Entry
    state: str = ""


class Transfer:
    """The threads of one save, export or verification; a context manager."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._files = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="files")
        self._reads = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="reads")
        self._budget = Budget(READS_AT_ONCE)
        self._failed = threading.Event()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self._failed.set()
        self._files.shutdown(wait=True, cancel_futures=True)
        self._reads.shutdown(wait=True, cancel_futures=True)

    def each(self, nodes: Sequence[Node], job: Callable[[Node], T]) -> list[T]:
        """Run a job for each file, in parallel and the largest first; return the results in the order of `nodes`.

        Errors: the first error of a job; the other jobs are given up then.
        """
        futures: dict[int, Future[T]] = {}
        for index in sorted(range(len(nodes)), key=lambda index: -nodes[index].size):
            futures[index] = self._files.submit(self._unless_failed, job, nodes[index])
        done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
        failures = [error for each in done if (error := each.exception()) is not None]
        if failures:
            self._failed.set()
            for each in futures.values():
                each.cancel()
            wait(futures.values())
            raise next((error for error in failures if not isinstance(error, _GivenUp)), failures[0])
        return [futures[index].result() for index in range(len(nodes))]

    def move(self, tree: ReadableTree, node: Node, target: Tree | None) -> Moved:
        """Read a file for its digest, and copy it into `target`. Errors: SourceChanged, SourceInvalid, StoreError."""
        sha256 = hashlib.sha256()
        with closing(self.pieces(tree, node)) as pieces:
            first = next(pieces)
            if stat.S_ISLNK(first.mode):  # s3fs writes a link as a file whose content is the target
                entry = Entry(node.path, "symlink", target=bytes(first.body).decode())
                if target is not None:
                    target.make(entry, bare=False)
                self.progress.count(1, node.size)
                return Moved(node, entry)
            if not stat.S_ISREG(first.mode):
                raise SourceInvalid(
                    f"{tree.location}/{node.path}: is a device, socket or FIFO, which no version can hold"
                )
            mode = stat.S_IMODE(first.mode)
            with nullcontext() if target is None else target.write(node.path, mode, node.size) as sink:
                piece: Piece | None = first
                while piece is not None:
                    sha256.update(piece.body)
                    if sink is not None and len(piece.body):
                        sink.write(piece.body)
                    self._go_on(len(piece.body))
                    piece = next(pieces, None)
        self.progress.count(1, 0)
        entry = Entry(node.path, "file", mode, node.size, sha256.hexdigest())
        return Moved(node, entry, sink.state if sink is not None else "")

    def check(self, tree: ReadableTree, node: Node, entry: Entry, target: Tree | None = None) -> None:
        """Compare a version's file with its entry, and copy it into `target`, where nothing of it stays after an error.

        Errors: VersionDamaged with the path and both digests or modes.
        """
        writing = nullcontext() if target is None else target.write(entry.path, entry.mode, entry.size)
        with closing(self.pieces(tree, node)) as pieces, writing as sink:
            for chunk in self.checked(tree, entry, pieces):
                if sink is not None and len(chunk):
                    sink.write(chunk)

    def checked(self, tree: ReadableTree, entry: Entry, pieces: Iterable[Piece]) -> Iterator[Body]:
        """Yield the chunks of a version's file. Errors: VersionDamaged, after the last, when they are not as saved."""
        sha256 = hashlib.sha256()
        mode = stat.S_IFREG | entry.mode
        for piece in pieces:
            sha256.update(piece.body)
            mode = piece.mode
            yield piece.body
            self._go_on(len(piece.body))
        where = f"{tree.location}/{entry.path}"
        if (found := sha256.hexdigest()) != entry.sha256:
            raise VersionDamaged(f"{where}: was saved with sha256 {entry.sha256}, and has {found} now")
        if not stat.S_ISREG(mode) or not has_mode(entry, stat.S_IMODE(mode)):
            raise VersionDamaged(f"{where}: was saved with mode {entry.mode:04o}, and has {stat.S_IMODE(mode):04o} now")
        self.progress.count(1, 0)

    def pieces(self, tree: ReadableTree, node: Node) -> Generator[Piece]:
        """Yield the chunks of a file in order, those of a large file read ahead; an empty file has one empty chunk."""
        if node.size > chunk_bytes(node.size):
            with closing(self.stream(tree, [node])) as pieces:
                for _, piece in pieces:
                    yield piece
            return
        self._budget.take(first=True)
        try:
            yield tree.read(node, 0, node.size)
        finally:
            self._budget.give()

    def stream(self, tree: ReadableTree, nodes: Sequence[Node]) -> Generator[tuple[int, Piece]]:
        """Yield the chunks of several files in order, read ahead, each with the index of its file in `nodes`."""
        ahead: deque[tuple[int, Future[Piece]]] = deque()
        left = _cuts(nodes)
        cut = next(left, None)
        try:
            while ahead or cut is not None:
                while cut is not None and len(ahead) < AHEAD and self._budget.take(first=not ahead):
                    index, start, stop = cut
                    ahead.append((index, self._reads.submit(tree.read, nodes[index], start, stop)))
                    cut = next(left, None)
                yield ahead[0][0], ahead[0][1].result()
                ahead.popleft()
                self._budget.give()
        finally:
            for _, each in ahead:
                if not each.cancel():
                    each.exception()
                self._budget.give()

    def _go_on(self, size_bytes: int) -> None:
        self.progress.count(0, size_bytes)
        if self._failed.is_set():
            raise _GivenUp

    def _unless_failed(self, job: Callable[[Node], T], node: Node) -> T:
        self._go_on(0)
        return job(node)


def _cuts(nodes: Sequence[Node]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the file, start, stop) for every chunk; an empty file has one chunk, too."""
    for index, node in enumerate(nodes):
        step = chunk_bytes(node.size)
        for start in range(0, node.size, step) or range(1):
            yield index, start, min(start + step, node.size)


class _GivenUp(Exception):
    """This job is given up, because another file's job failed."""
