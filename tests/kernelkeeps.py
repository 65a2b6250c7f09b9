"""A model of what Linux keeps of directories that it reads (fs/fuse/readdir.c, FOPEN_CACHE_DIR), for tests without one.

Pessimistic: nothing but an OPENDIR without FOPEN_KEEP_CACHE, an invalidation and the want of memory makes it drop
anything; neither the directory's mtime nor an invalidated name does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datastore.fuse.ops import Caller, DirEntry, Fh, Filesystem, Ino, OpenDirReply
from tests.driving import resolve

PAGE = 3
"""Entries of one page of the cache."""
CALLER = Caller(0, 0, 1)


@dataclass
class Room:
    """A buffer for so many entries."""

    left: int

    def take(self, name_length: int) -> bool:
        self.left -= 1
        return self.left >= 0


@dataclass
class Kept:
    """What is kept of one directory. pages: None where one was dropped."""

    complete: bool = False
    version: int = 0
    pages: list[list[DirEntry] | None] = field(default_factory=list)
    count: int = 0
    """Entries added, those of dropped pages included."""
    end: int = 0
    """The cursor at which it ends."""

    def drop(self) -> None:
        """All pages; what is known of them stays."""
        self.pages = [None] * len(self.pages)

    def reset(self) -> None:
        """Begin anew."""
        self.complete, self.version, self.pages, self.count, self.end = False, self.version + 1, [], 0, 0

    def add(self, entry: DirEntry, cursor: int) -> None:
        """What was read at a cursor, if that is where it ends."""
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
    """READDIRs sent."""

    def __post_init__(self) -> None:
        reply = resolve(self.fs.opendir(CALLER, self.ino))
        assert isinstance(reply, OpenDirReply)
        self.fh, self.cache, self.keeps = reply
        self.cursor = 0
        if not self.keeps:
            self.kept.drop()

    def rewind(self) -> None:
        """To the beginning."""
        self.cursor = 0

    def close(self) -> None:
        """RELEASEDIR."""
        self.fs.loop.call(lambda: self.fs.releasedir(self.ino, self.fh))

    def read(self, count: int) -> list[DirEntry]:
        """The next entries; none at the end."""
        found, enough = self.from_kept(count)
        return found if enough else found + self.arrive(*self.ask(count))

    def from_kept(self, count: int) -> tuple[list[DirEntry], bool]:
        """What is kept, and whether the server need not be asked."""
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
        """READDIRPLUS: the answer, and the cursor that it was for; it takes effect by arrive()."""
        self.asked += 1
        return list(resolve(self.fs.readdir(self.ino, Fh(self.fh), self.cursor, Room(count), plus))), self.cursor

    def arrive(self, lines: list[DirEntry], cursor: int) -> list[DirEntry]:
        """The kernel has an answer."""
        if not lines and self.cache and cursor == self.kept.end:
            self.kept.complete = True
        for entry in lines:
            if self.cache:
                self.kept.add(entry, cursor)
            cursor = entry.offset
        self.cursor = cursor
        return lines


def names(lines: list[DirEntry]) -> list[bytes]:
    """Without the dots."""
    return [line.name for line in lines if line.name not in (b".", b"..")]
