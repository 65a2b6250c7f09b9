"""Mixed operations on a directory, each checked against what a worker remembers of its own files."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from datastore.linuxfds import memfd

FILES, DIRECTORIES = 60, 6
"""How many files and directories one worker has."""
SMALL, LARGE = 128 << 10, 9 << 20
"""Sizes of files, in bytes; a LARGE file is uploaded in parts."""
GROWN = 512 << 10
"""The size in bytes above which a file that was appended to is cut."""
MEASURED_KEPT = 50
"""How many failures are reported with their text; further ones are only counted."""


class WrongBytes(Exception):
    """The bytes read are not those that were written."""


@dataclass
class Log:
    """The operations of all workers. Thread-safe."""

    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    slowest_s: float = 0.0
    slowest: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began: float = field(default_factory=time.monotonic)

    def note(self, what: str, seconds: float, failure: str = "") -> None:
        """Record an operation that has ended."""
        with self._lock:
            self.done[what] += 1
            if seconds > self.slowest_s:
                self.slowest_s, self.slowest = seconds, what
            if failure:
                self.failed += 1
                if len(self.failures) < MEASURED_KEPT:
                    at_s = time.monotonic() - self._began
                    self.failures.append(f"{at_s:.0f} s: {what} after {seconds:.1f} s: {failure}")

    @property
    def operations(self) -> int:
        """How many operations have ended."""
        with self._lock:
            return sum(self.done.values())


class Worker(threading.Thread):
    """Works in a directory of its own. files: what every file in it must contain."""

    def __init__(self, root: Path, number: int, log: Log, stopping: threading.Event) -> None:
        super().__init__(name=f"load-{number}", daemon=True)
        self.root = root / f"worker{number}"
        self.files: dict[str, bytes] = {}
        self.going = threading.Event()
        self.idle = threading.Event()
        self._directories = ["."]
        self._random = random.Random(number)
        self._log, self._stopping = log, stopping
        self._number = 0
        self._operations: dict[str, tuple[int, Callable[[], None]]] = {
            "stat": (30, self._stat),
            "read": (20, self._read),
            "read range": (20, self._read_range),
            "list": (10, self._list),
            "create": (12, self._create),
            "append": (6, self._append),
            "overwrite": (4, self._overwrite),
            "truncate": (2, self._truncate),
            "rename": (4, self._rename),
            "rename over": (2, self._rename_over),
            "rename directory": (1, self._rename_directory),
            "unlink": (5, self._unlink),
            "mmap": (3, self._mmap),
            "hold open": (1, self._hold_open),
            "mkdir": (1, self._mkdir),
            "symlink": (1, self._symlink),
            "large": (1, self._large),
        }

    def run(self) -> None:
        """Work until `stopping` is set; pause while `going` is not set, and set `idle` then."""
        self._do("mkdir", lambda: self.root.mkdir(exist_ok=True))
        names = list(self._operations)
        weights = [weight for weight, _ in self._operations.values()]
        while not self._stopping.is_set():
            if not self.going.is_set():
                self.idle.set()
                self.going.wait(0.2)
                continue
            self.idle.clear()
            (name,) = self._random.choices(names, weights)
            self._do(name, self._operations[name][1])
        self.idle.set()

    def _do(self, name: str, operation: Callable[[], None]) -> None:
        began = time.monotonic()
        failure = ""
        try:
            operation()
        except Exception as error:  # any error fails the soak, which goes on nevertheless
            failure = f"{type(error).__name__}: {error}"
        self._log.note(name, time.monotonic() - began, failure)

    # -- what it knows

    def _new_name(self) -> str:
        self._number += 1
        return os.path.join(self._random.choice(self._directories), f"f{self._number}")

    def _some(self) -> str:
        """Return the name of an existing file; create one if there is none."""
        if not self.files:
            self._create()
        return self._random.choice(list(self.files))

    def _path(self, name: str) -> Path:
        return self.root / name

    def _body(self, limit: int) -> bytes:
        return self._random.randbytes(self._random.choice((0, 100, 4096, limit // 4, self._random.randrange(limit))))

    def _forget(self, name: str) -> bytes:
        """Forget a file during a change: after an error its content is not known, and the file is left alone."""
        return self.files.pop(name)

    # -- operations

    def _create(self) -> None:
        if len(self.files) >= FILES:
            self._unlink()
        name, body = self._new_name(), self._body(SMALL)
        with self._path(name).open("wb", buffering=0) as file:
            file.write(body)
            if self._random.random() < 0.1:
                os.fsync(file.fileno())
        self.files[name] = body

    def _read(self) -> None:
        name = self._some()
        found = self._path(name).read_bytes()
        _same(name, found, self.files[name])

    def _read_range(self) -> None:
        name = self._some()
        body = self.files[name]
        start = self._random.randrange(len(body) + 1)
        with self._path(name).open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), 8192, start)
        _same(f"{name} at {start}", found, body[start : start + 8192])

    def _stat(self) -> None:
        name = self._some()
        seen = self._path(name).stat()
        if seen.st_size != len(self.files[name]):
            raise WrongBytes(f"{name} has {seen.st_size} bytes, not {len(self.files[name])}: {seen}")

    def _list(self) -> None:
        directory = self._random.choice(self._directories)
        found = {entry for entry in os.listdir(self._path(directory)) if entry.startswith("f")}
        known = {os.path.basename(name) for name in self.files if os.path.dirname(name) == directory}
        if known - found:
            raise WrongBytes(f"{directory} does not list {sorted(known - found)[:5]}")

    def _append(self) -> None:
        name, more = self._some(), self._body(SMALL)
        body = self._forget(name)
        with self._path(name).open("ab", buffering=0) as file:
            file.write(more)
        self.files[name] = body + more
        if len(self.files[name]) > GROWN:
            self._cut(name, 100)

    def _overwrite(self) -> None:
        name, patch = self._some(), self._body(4096)
        body = self._forget(name)
        start = self._random.randrange(len(body) + 1)
        with self._path(name).open("r+b", buffering=0) as file:
            file.seek(start)
            file.write(patch)
        self.files[name] = body[:start] + patch + body[start + len(patch) :]

    def _truncate(self) -> None:
        name = self._some()
        self._cut(name, self._random.randrange(len(self.files[name]) + 1000))

    def _cut(self, name: str, size: int) -> None:
        body = self._forget(name)
        os.truncate(self._path(name), size)
        self.files[name] = body[:size] + bytes(max(0, size - len(body)))

    def _rename(self) -> None:
        self._move(self._some(), self._new_name())

    def _rename_over(self) -> None:
        old, new = self._some(), self._some()
        if old != new:
            self._forget(new)
            self._move(old, new)

    def _move(self, old: str, new: str) -> None:
        body = self._forget(old)
        self._path(old).rename(self._path(new))
        self.files[new] = body

    def _rename_directory(self) -> None:
        if len(self._directories) == 1:
            return self._mkdir()
        old = self._random.choice(self._directories[1:])
        self._number += 1
        new = f"d{self._number}"
        inside = [name for name in self.files if os.path.dirname(name) == old]
        bodies = {os.path.join(new, os.path.basename(name)): self._forget(name) for name in inside}
        self._directories.remove(old)
        self._path(old).rename(self._path(new))
        self._directories.append(new)
        self.files.update(bodies)
        return None

    def _mkdir(self) -> None:
        if len(self._directories) > DIRECTORIES:
            return self._rmdir()
        self._number += 1
        self._path(f"d{self._number}").mkdir()
        self._directories.append(f"d{self._number}")
        return None

    def _rmdir(self) -> None:
        directory = self._directories.pop(1)
        for name in [name for name in self.files if os.path.dirname(name) == directory]:
            self._remove(name)
        with suppress(FileNotFoundError):
            for entry in os.listdir(self._path(directory)):  # files that a failed operation left
                self._path(directory).joinpath(entry).unlink()
        self._path(directory).rmdir()

    def _unlink(self) -> None:
        self._remove(self._some())

    def _remove(self, name: str) -> None:
        self._forget(name)
        self._path(name).unlink()

    def _mmap(self) -> None:
        name = self._some()
        if self.files[name]:
            with self._path(name).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                _same(f"{name} (mmap)", _copied(mapped), self.files[name])

    def _hold_open(self) -> None:
        """Write a file piece by piece over a while, and read it by the same descriptor in between."""
        name, body = self._new_name(), b""
        with self._path(name).open("w+b", buffering=0) as file:
            for _ in range(5):
                piece = self._body(16 << 10)
                file.write(piece)
                body += piece
                _same(f"{name} (open)", os.pread(file.fileno(), len(body) + 1, 0), body)
                self._stopping.wait(self._random.uniform(0, 0.4))
        self.files[name] = body

    def _symlink(self) -> None:
        self._number += 1
        link = self._path(f"l{self._number}")
        link.symlink_to("target")
        if os.readlink(link) != "target":
            raise WrongBytes(f"{link.name} points elsewhere")
        link.unlink()

    def _large(self) -> None:
        if self._random.random() < 0.9:
            return self._stat()
        self._number += 1
        path = self._path(f"big{self._number}")
        body = self._random.randbytes(1 << 20) * (LARGE >> 20)
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(body), 1 << 20):
                file.write(body[start : start + (1 << 20)])
        _same(path.name, path.read_bytes(), body)
        path.unlink()
        return None


def _copied(mapped: mmap.mmap) -> bytes:
    """Return the bytes of a memory map. The kernel copies them, as a page fault in Python would stop all its threads,
    even the one that has to start the store again for which the fault waits."""
    fd = memfd("copy")
    try:
        done = 0
        while done < len(mapped):
            done += os.write(fd, memoryview(mapped)[done:])
        return os.pread(fd, done, 0)
    finally:
        os.close(fd)


def _same(what: str, found: bytes, expected: bytes) -> None:
    if found == expected:
        return
    shorter = min(len(found), len(expected))
    at = next((index for index in range(shorter) if found[index] != expected[index]), shorter)
    raise WrongBytes(f"{what}: {len(found)} bytes, {len(expected)} expected; they differ from byte {at} on")
