"""The load under which servers are killed: `python -m tests.survival.load KIND DIRECTORY CONTROL SEED halt|"go on"`.

Each process works in a directory of its own and knows what must be in it. It runs until the file `CONTROL/stop` exists
("halt": or an error occurs), and then writes CONTROL/KIND.json: operations, errors of system calls, wrong bytes, and
the content of each file (path -> sha256). CONTROL/KIND.count counts operations while the process runs.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PERIOD = b"".join(b"%07d\n" % number for number in range(9_973))


def pattern(seed: int, size: int) -> bytes:
    """Return the content of file `seed`. Its period is no multiple of a block or page, and each seed's is different."""
    head = b"<%08d>" % seed
    body = head + PERIOD[seed % 4000 :] + PERIOD * (size // len(PERIOD) + 1)
    return body[:size]


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Repeat pread(2) until `size` bytes or the end, because a single read may return less than it was asked for."""
    body = b""
    while len(body) < size and (piece := os.pread(fd, size - len(body), offset + len(body))):
        body += piece
    return body


class Load:
    """One process of the load. A subclass's step() does some operations; verify() checks all files at the end."""

    def __init__(self, directory: Path, control: Path, seed: int, *, halt_on_error: bool = False) -> None:
        self.directory = directory
        self.control = control
        self.random = random.Random(seed)
        self.operations = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.content: dict[str, bytes] = {}
        """The content of each file, by the system calls that have returned."""
        self.doubt: set[str] = set()
        """The names that the current step works on, whose content is uncertain if the step is cut off."""
        self._halt_on_error = halt_on_error
        self._count = os.open(control / f"{self.kind}.count", os.O_RDWR | os.O_CREAT)

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    def begin(self) -> None:
        """Prepare files, before the first kill."""

    def step(self) -> None:
        raise NotImplementedError

    def verify(self) -> None:
        for name, content in self.content.items():
            self.expect(name, (self.directory / name).read_bytes(), content)

    def expect(self, what: str, seen: bytes, wanted: bytes) -> None:
        if seen != wanted:
            both = enumerate(zip(seen, wanted, strict=False))
            at = next((index for index, (one, other) in both if one != other), min(len(seen), len(wanted)))
            self.wrong.append(f"{what}: {len(seen)} bytes, {len(wanted)} expected, first difference at {at}")

    def expect_that(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def run(self) -> None:
        self.begin()
        while not (self.control / "stop").exists():
            self.doubt.clear()
            if not self._guarded(self.step) and self._halt_on_error:
                break
            self.operations += 1
            os.pwrite(self._count, b"%d" % self.operations, 0)
        if not self._halt_on_error:
            self._guarded(self.verify)

    def _guarded(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except OSError as error:
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = where.tb_lineno if where is not None else 0
            self.errors.append(f"{time.strftime('%H:%M:%S')} line {line}: {error!r}")
            return False
        return True

    def report(self) -> dict[str, Any]:
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in self.content.items()}
        lengths = {name: len(content) for name, content in self.content.items()}
        return {
            "operations": self.operations,
            "errors": self.errors,
            "wrong": self.wrong,
            "content": hashes,
            "lengths": lengths,
            "doubt": sorted(self.doubt),
        }


class Read(Load):
    """Reads whole files, and ranges of files that stay open; no process writes them."""

    FILES = 24

    def begin(self) -> None:
        for number in range(self.FILES):
            self.content[f"r{number:02}"] = pattern(number, 1000 + number * number * 4099)
        for name, content in self.content.items():
            (self.directory / name).write_bytes(content)
        self.held = {name: os.open(self.directory / name, os.O_RDONLY) for name in list(self.content)[::3]}

    def step(self) -> None:
        name = self.random.choice(list(self.content))
        self.expect(name, (self.directory / name).read_bytes(), self.content[name])
        name = self.random.choice(list(self.held))
        wanted = self.content[name]
        offset = self.random.randrange(len(wanted))
        if self.random.random() < 0.3:
            os.posix_fadvise(self.held[name], 0, 0, os.POSIX_FADV_DONTNEED)
        self.expect(f"{name} at {offset}", read_at(self.held[name], 70_000, offset), wanted[offset : offset + 70_000])


class Mapped(Load):
    """Reads a large file through a memory map, whose pages are dropped now and then."""

    SIZE = 12_000_000

    def begin(self) -> None:
        self.content["big"] = pattern(77, self.SIZE)
        (self.directory / "big").write_bytes(self.content["big"])
        with (self.directory / "big").open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self.fd = os.dup(file.fileno())

    def step(self) -> None:
        if self.random.random() < 0.2:
            self.map.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = self.random.randrange(self.SIZE - 9000)
        seen = bytes(self.map[offset : offset + 9000])
        self.expect(f"big, mapped, at {offset}", seen, self.content["big"][offset : offset + 9000])


class Append(Load):
    """Appends to two logs: one that stays open, and one that is opened for each line."""

    def begin(self) -> None:
        self.content = {"held": b"", "again": b""}
        self.fd = os.open(self.directory / "held", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def step(self) -> None:
        self.doubt = {"held", "again"}
        line = b"%08d " % self.operations + pattern(self.operations, self.random.randrange(1, 3000)) + b"\n"
        os.write(self.fd, line)
        self.content["held"] += line
        if self.random.random() < 0.1:
            os.fsync(self.fd)
        if self.random.random() < 0.05:
            os.close(self.fd)
            self.fd = os.open(self.directory / "held", os.O_WRONLY | os.O_APPEND)
        if self.random.random() < 0.2:
            with (self.directory / "again").open("ab", buffering=0) as file:
                file.write(line)
            self.content["again"] += line
        if self.random.random() < 0.1:
            self.verify()


class Create(Load):
    """Creates files, whole and in pieces, reads them back, changes them in the middle and removes them."""

    def step(self) -> None:
        name = f"c{self.random.randrange(40):02}"
        path = self.directory / name
        self.doubt = {name}
        content = pattern(self.operations, self.random.choice((0, 1, 4096, 30_000, 200_000)))
        if name not in self.content:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            half = len(content) // 2
            os.write(fd, content[:half])
            os.write(fd, content[half:])
            os.close(fd)
            self.content[name] = content
            self.expect_that(path.stat().st_mode & 0o777 == 0o640, f"{name}: mode {path.stat().st_mode:o}")
        elif self.random.random() < 0.4:
            del self.content[name]
            path.unlink()
            self.expect_that(not path.exists(), f"{name} is there after its removal")
        elif self.random.random() < 0.5 and len(self.content[name]) > 10:
            at = self.random.randrange(len(self.content[name]) - 5)
            old = self.content.pop(name)
            with path.open("r+b", buffering=0) as file:
                file.seek(at)
                file.write(b"CHANGE")
            self.content[name] = old[:at] + b"CHANGE" + old[at + 6 :]
        else:
            del self.content[name]
            path.write_bytes(content)
            self.content[name] = content
        if name in self.content:
            self.expect(name, path.read_bytes(), self.content[name])


class Rename(Load):
    """Renames files and directories, also over each other, with and without unsent bytes and open readers."""

    def begin(self) -> None:
        (self.directory / "d0").mkdir()
        self.at = 0
        for number in range(12):
            self._write(f"f{number:02}", pattern(number, 3000 + number))
        for number in range(5):
            self._write(f"d0/x{number}", pattern(number + 50, 2000))

    def _write(self, name: str, content: bytes) -> None:
        (self.directory / name).write_bytes(content)
        self.content[name] = content

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.15:
            self._rename_directory()
            return
        old = self.random.choice([name for name in self.content if "/" not in name])
        new = f"f{self.random.randrange(16):02}"
        self.doubt = {old, new}
        if chance < 0.4 and new != old:
            self._rename_written(old, new)
        elif new != old:
            with (self.directory / old).open("rb") as reader:
                self.content.pop(new, None)
                (self.directory / old).rename(self.directory / new)
                self.content[new] = self.content.pop(old)
                self.expect(f"{old} as {new}, held", reader.read(), self.content[new])
        self.expect_that(new == old or not (self.directory / old).exists(), f"{old} is there after its rename")
        self.expect(new, (self.directory / new).read_bytes(), self.content[new])

    def _rename_written(self, old: str, new: str) -> None:
        """Rename a file while it is written, as editors and downloads do."""
        with (self.directory / old).open("ab", buffering=0) as writer:
            writer.write(b"one")
            self.content[old] += b"one"
            self.content.pop(new, None)
            (self.directory / old).rename(self.directory / new)
            self.content[new] = self.content.pop(old)
            writer.write(b"two")
            self.content[new] += b"two"

    def _rename_directory(self) -> None:
        old, new = f"d{self.at}", f"d{self.at + 1}"
        self.doubt = {f"{each}/x{number}" for each in (old, new) for number in range(5)}
        with (self.directory / old / "x0").open("rb") as reader:
            (self.directory / old).rename(self.directory / new)
            self.at += 1
            for number in range(5):
                self.content[f"{new}/x{number}"] = self.content.pop(f"{old}/x{number}")
            self.expect(f"{new}/x0, held", reader.read(), self.content[f"{new}/x0"])
        self.expect_that(not (self.directory / old).exists(), f"{old} is there after its rename")
        self.expect(f"{new}/x1", (self.directory / new / "x1").read_bytes(), self.content[f"{new}/x1"])


class List(Load):
    """Lists a directory in which names come and go: the names that stay must be listed once."""

    STAYING = 300

    def begin(self) -> None:
        for number in range(self.STAYING):
            self.content[f"s{number:04}"] = b""
            os.close(os.open(self.directory / f"s{number:04}", os.O_WRONLY | os.O_CREAT))

    def step(self) -> None:
        name = f"s{self.random.randrange(self.STAYING):04}~"
        (self.directory / name).touch()
        if self.random.random() < 0.5:
            seen = os.listdir(self.directory)
        else:
            with os.scandir(self.directory) as entries:
                seen = [entry.name for entry in entries if entry.is_file()]
        self.expect_that(name in seen, f"{name} is not listed")
        # A file that was removed while open may be shown as .nfs... (S-265), after a crash until the next mount.
        staying = sorted(each for each in seen if not each.endswith("~") and not each.startswith(".nfs"))
        if staying != sorted(self.content):
            missing, more = set(self.content) - set(staying), len(staying) - len(set(staying))
            self.wrong.append(f"a listing lacks {sorted(missing)[:5]} and has {more} names twice")
        (self.directory / name).unlink()


class Temporary(Load):
    """Uses files after their removal."""

    def begin(self) -> None:
        self.held: dict[int, bytes] = {}

    def step(self) -> None:
        if len(self.held) < 6:
            content = pattern(self.operations, self.random.randrange(100, 90_000))
            path = self.directory / f"t{self.operations}"
            if self.random.random() < 0.5:
                path.write_bytes(content)
                fd = os.open(path, os.O_RDWR)
            else:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.write(fd, content)
            path.unlink()
            self.held[fd] = content
        fd = self.random.choice(list(self.held))
        self.expect("a removed file", read_at(fd, len(self.held[fd]) + 1, 0), self.held[fd])
        os.pwrite(fd, b"more", len(self.held[fd]))
        self.held[fd] += b"more"
        self.expect_that(os.fstat(fd).st_size == len(self.held[fd]), "a removed file has another size")
        if self.random.random() < 0.2:
            os.close(fd)
            del self.held[fd]


KINDS = {load.__name__.lower(): load for load in (Read, Mapped, Append, Create, Rename, List, Temporary)}


def main(kind: str, directory: str, control: str, seed: str, halt: str) -> None:
    """Run one load to its end and write its report."""
    load = KINDS[kind](Path(directory), Path(control), int(seed), halt_on_error=halt == "halt")
    load.run()
    temporary = Path(control, f"{kind}.new")
    temporary.write_text(json.dumps(load.report()))
    temporary.replace(Path(control, f"{kind}.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
