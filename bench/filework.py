"""The file operations of the workloads, run in a worker below a directory of any mount, with the standard library only.

Each function returns seconds and counts, checks the content that it reads, and ends early after cap_s seconds.
"""

from __future__ import annotations

import os
import random
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from bench.payload import BLOCK, WrongContent, block, blocks, check_file, check_part

Answer = dict[str, float]
WATCH_EVERY = 64
"""A walk looks at the clock each time it has seen this many entries more."""


def parallel(threads: int, work: Callable[[int], None]) -> float:
    """Run work(0..threads-1) in parallel threads and return the seconds. Errors: the first error of any thread."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    started = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    began = time.monotonic()
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    seconds = time.monotonic() - began
    if errors:
        raise errors[0]
    return seconds


def _read_range(path: str, start: int, stop: int, deadline: float) -> int:
    """Read a range in steps of 1 MiB, check the content, and return the number of bytes read by the deadline."""
    descriptor = os.open(path, os.O_RDONLY)
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    offset = start
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        while offset < stop and time.monotonic() < deadline:
            count = os.readv(descriptor, [view[: min(BLOCK, stop - offset)]])
            if count == 0:
                raise WrongContent(f"{path}: ends at {offset}, not at {stop}")
            check_part(offset, view[:count], path)
            offset += count
    finally:
        os.close(descriptor)
    return offset - start


def read_sequential(path: str, size: int, cap_s: float) -> Answer:
    """Read the whole file with one thread."""
    began = time.monotonic()
    count = _read_range(path, 0, size, began + cap_s)
    return {"seconds": time.monotonic() - began, "bytes": count, "partial": count < size}


def read_streams(path: str, size: int, streams: int, cap_s: float) -> Answer:
    """Read one file with several threads; each reads its own part from its own descriptor."""
    part = size // streams
    counts = [0] * streams
    deadline = time.monotonic() + cap_s

    def stream(number: int) -> None:
        counts[number] = _read_range(path, number * part, (number + 1) * part, deadline)

    seconds = parallel(streams, stream)
    return {"seconds": seconds, "bytes": sum(counts), "partial": sum(counts) < part * streams}


def read_random(path: str, size: int, length: int, count: int, cap_s: float) -> Answer:
    """Read aligned blocks at random offsets, which are the same for every subject."""
    places = random.Random(length)
    descriptor = os.open(path, os.O_RDONLY)
    began = time.monotonic()
    done = 0
    try:
        while done < count and time.monotonic() - began < cap_s:
            offset = places.randrange(size // length) * length
            found = os.pread(descriptor, length, offset)
            if len(found) != length:
                raise WrongContent(f"{path}: {len(found)} bytes of {length} at {offset}")
            check_part(offset, found, path)
            done += 1
    finally:
        os.close(descriptor)
    return {"seconds": time.monotonic() - began, "count": done, "partial": done < count}


def write_sequential(path: str, size: int) -> Answer:
    """Write a file 1 MiB at a time, fsync and close it. began and closed: time.monotonic()."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    began = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        for piece in blocks(size):
            if file.write(piece) != len(piece):
                raise WrongContent(f"{path}: a short write")
        os.fsync(file.fileno())
    return {"began": began, "closed": time.monotonic()}


def _name(folder: str, number: int) -> str:
    return f"{folder}/f{number:05}"


def read_files(folder: str, count: int, size: int, threads: int, cap_s: float) -> Answer:
    """Read whole small files in the order of their names; each thread takes every threads-th. Listing isn't timed."""
    if len(os.listdir(folder)) < count:
        raise WrongContent(f"{folder}: fewer than {count} files")
    deadline = time.monotonic() + cap_s
    done = [0] * threads

    def reader(first: int) -> None:
        for number in range(first, count, threads):
            if time.monotonic() > deadline:
                return
            descriptor = os.open(_name(folder, number), os.O_RDONLY)
            try:
                # Ask for one byte more than there is, as a program that reads to the end does.
                found = os.read(descriptor, size + 1)
                while found and len(found) < size and (more := os.read(descriptor, size + 1 - len(found))):
                    found += more
            finally:
                os.close(descriptor)
            check_file(number, found, size, _name(folder, number))
            done[first] += 1

    seconds = parallel(threads, reader)
    return {"seconds": seconds, "count": sum(done), "partial": sum(done) < count}


def create_files(folder: str, count: int, size: int, threads: int, cap_s: float) -> Answer:
    """Create small files as open(name, "wb") does. began and closed: time.monotonic()."""
    os.makedirs(folder, exist_ok=True)
    began = time.monotonic()
    deadline = began + cap_s
    done = [0] * threads

    def writer(first: int) -> None:
        for number in range(first, count, threads):
            if time.monotonic() > deadline:
                return
            descriptor = os.open(_name(folder, number), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            try:
                if os.write(descriptor, block(number, size)) != size:
                    raise WrongContent(f"{_name(folder, number)}: a short write")
            finally:
                os.close(descriptor)
            done[first] += 1

    parallel(threads, writer)
    return {"began": began, "closed": time.monotonic(), "count": sum(done), "partial": sum(done) < count}


def walk(top: str, entries: int, cap_s: float) -> Answer:
    """readdir and lstat everything below; the seconds are extrapolated to `entries` if the time limit came first."""
    began = time.monotonic()
    waiting, count, partial = [top], 0, False
    while waiting and not partial:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                if stat.S_ISDIR(os.lstat(entry.path).st_mode):
                    waiting.append(entry.path)
                count += 1
                if count % WATCH_EVERY == 0 and time.monotonic() - began > cap_s:
                    partial = True
                    break
    seconds = time.monotonic() - began
    partial = partial and count < entries
    if not partial and count != entries:
        raise WrongContent(f"{top}: {count} entries below it, not {entries}")
    return {"seconds": seconds * entries / count, "count": count, "partial": partial}


def hold_open(folders: Sequence[str], count: int, cap_s: float) -> Answer:
    """Open `count` files below the folders, read a byte of each, and close all of them at the end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[int] = []
    began = time.monotonic()
    try:
        for path in _files(folders):
            if len(held) == count or time.monotonic() - began > cap_s:
                break
            held.append(os.open(path, os.O_RDONLY))
            os.read(held[-1], 1)
        return {"seconds": time.monotonic() - began, "count": len(held), "partial": len(held) < count}
    finally:
        for descriptor in held:
            os.close(descriptor)


def _files(folders: Iterable[str]) -> Iterable[str]:
    return (os.path.join(folder, name) for top in folders for folder, _, names in os.walk(top) for name in names)


def first_byte(path: str) -> Answer:
    """Measure the seconds from opening a file to its first byte."""
    began = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        if len(file.read(1)) != 1:
            raise WrongContent(f"{path}: is empty")
    return {"seconds": time.monotonic() - began}


def kill_and_ask(pid: int, path: str) -> Answer:
    """Measure the seconds from kill -9 of a server to the answer to a stat of a file that was not asked for before."""
    began = time.monotonic()
    os.kill(pid, 9)
    os.stat(path)
    return {"seconds": time.monotonic() - began}


def metadata(operation: str, folder: str, count: int) -> Answer:
    """Make `count` calls of one kind; all must succeed."""
    call = _CALLS[operation]
    began = time.monotonic()
    for number in range(count):
        call(folder, number)
    return {"seconds": time.monotonic() - began, "count": count}


def rename_folder(old: str, new: str) -> Answer:
    """Measure the seconds of one rename of a folder."""
    began = time.monotonic()
    os.rename(old, new)
    return {"seconds": time.monotonic() - began}


def make_folders(folders: Sequence[str]) -> Answer:
    """Create folders with their parents."""
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
    return {}


def _create(folder: str, number: int) -> None:
    os.close(os.open(f"{folder}/f{number}", os.O_CREAT | os.O_WRONLY, 0o644))


def _stat(folder: str, number: int) -> None:
    if os.stat(f"{folder}/f{number}").st_size != 0:
        raise WrongContent(f"{folder}/f{number}: is not empty")


def _readlink(folder: str, number: int) -> None:
    if os.readlink(f"{folder}/s{number}") != f"target{number}":
        raise WrongContent(f"{folder}/s{number}: another target")


_CALLS: dict[str, Callable[[str, int], object]] = {
    "mkdir": lambda folder, number: os.mkdir(f"{folder}/d{number}"),
    "rmdir": lambda folder, number: os.rmdir(f"{folder}/d{number}"),
    "create": _create,
    "stat": _stat,
    "rename": lambda folder, number: os.rename(f"{folder}/f{number}", f"{folder}/g{number}"),
    "symlink": lambda folder, number: os.symlink(f"target{number}", f"{folder}/s{number}"),
    "readlink": _readlink,
    "litter": lambda folder, number: os.close(os.open(f"{folder}/u{number}", os.O_CREAT | os.O_WRONLY, 0o644)),
    "unlink": lambda folder, number: os.unlink(f"{folder}/u{number}"),
}
