"""A model of Linux's cache of read directories (fs/fuse/readdir.c, FOPEN_CACHE_DIR), for tests without a mount.

The model is pessimistic: only an OPENDIR without FOPEN_KEEP_CACHE, an invalidation or a lack of memory makes it drop
entries; neither a change of the directory's mtime nor the invalidation of a name does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datastore.fuse.ops import Caller, DirEntry, Fh, Filesystem, Ino, OpenDirReply
from tests.driving import resolve

PAGE = 3
"""How many entries one page of the cache has."""
CALLER = Caller(0, 0, 1)


@dataclass
class Room:
    """A reply buffer with room for `left` entries."""

    left: int

    def take(self, name_length: int) -> bool:
        self.left -= 1
        return self.left >= 0


@dataclass
class Kept:
    """The cache of one directory. pages: None in place of a page that was dropped."""

    complete: bool = False
    version: int = 0
    pages: list[list[DirEntry] | None] = field(default_factory=list)
    count: int = 0
    """How many entries were added, including those of dropped pages."""
    end: int = 0
    """The offset at which the cached entries end."""

    def drop(self) -> None:
        """Drop the content of all pages; the counters stay."""
        self.pages = [None] * len(self.pages)

    def reset(self) -> None:
        """Empty the cache and begin anew."""
        self.complete, self.version, self.pages, self.count, self.end = False, self.version + 1, [], 0, 0

    def add(self, entry: DirEntry, cursor: int) -> None:
        """Append an entry that was read at an offset (`cursor`), if the cache ends there."""
        if self.complete or cursor != self.end:
            return
        if self.count % PAGE == 0:
            self.pages.append([])
        page = self.pages[-1]
        if page is None:
            return
        page.append(entry)
        self.count += 1
        self.end = entry.offset


@dataclass
class OpenDirectory:
    """An open directory: read() is getdents(2), rewind() lseek(2) to 0."""

    fs: Filesystem
    ino: Ino
    kept: Kept
    asked: int = 0
    """How many READDIR requests were sent."""

    def __post_init__(self) -> None:
        reply = resolve(self.fs.opendir(CALLER, self.ino))
        assert isinstance(reply, OpenDirReply)
        self.fh, self.cache, self.keeps = reply
        self.cursor = 0
        if not self.keeps:
            self.kept.drop()

    def rewind(self) -> None:
        """Go back to the first entry."""
        self.cursor = 0

    def close(self) -> None:
        """Send RELEASEDIR."""
        self.fs.loop.call(lambda: self.fs.releasedir(self.ino, self.fh))

    def read(self, count: int) -> list[DirEntry]:
        """Return the next entries; none at the end."""
        found, enough = self.from_kept(count)
        return found if enough else found + self.arrive(*self.ask(count))

    def from_kept(self, count: int) -> tuple[list[DirEntry], bool]:
        """Return the next entries from the cache, and whether no request to the server is needed."""
        kept, at = self.kept, 0
        found: list[DirEntry] = []
        if not self.cache or not kept.complete:
            return found, False
        for page in kept.pages:
            if page is None:
                kept.reset()
                return found, False
            for entry in page:
                if at == self.cursor and len(found) < count:
                    found.append(entry)
                    self.cursor = entry.offset
                at = entry.offset
        return found, bool(found) or self.cursor == kept.end

    def ask(self, count: int, *, plus: bool = True) -> tuple[list[DirEntry], int]:
        """Send READDIRPLUS; return the answer and the offset that it is for. arrive() puts it into effect."""
        self.asked += 1
        return list(resolve(self.fs.readdir(self.ino, Fh(self.fh), self.cursor, Room(count), plus))), self.cursor

    def arrive(self, lines: list[DirEntry], cursor: int) -> list[DirEntry]:
        """Process an answer as the kernel does: cache its entries and move the offset behind them."""
        if not lines and self.cache and cursor == self.kept.end:
            self.kept.complete = True
        for entry in lines:
            if self.cache:
                self.kept.add(entry, cursor)
            cursor = entry.offset
        self.cursor = cursor
        return lines


def names(lines: list[DirEntry]) -> list[bytes]:
    """Return the names, without "." and ".."."""
    return [line.name for line in lines if line.name not in (b".", b"..")]
