"""The work of filework.py done on an export by plain libnfs: its blocking calls by ctypes, without our engine.

The answers are those of filework.py. A context of libnfs serves one thread at a time, so each thread has its own;
a large file is read and written by four threads, each of which takes every fourth MiB.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_uint64, c_void_p

from bench.filework import Answer, parallel
from bench.payload import BLOCK, WrongContent, block, check_file, check_part
from datastore.fuse.nfs.libnfs import library

CONNECTIONS = 4
_TYPES: dict[str, tuple[type, ...]] = {
    "mount": (c_char_p, c_char_p),
    "mkdir": (c_char_p,),
    "open": (c_char_p, c_int, c_void_p),
    "creat": (c_char_p, c_int, c_void_p),
    "pread": (c_void_p, c_uint64, c_uint64, c_void_p),
    "pwrite": (c_void_p, c_uint64, c_uint64, c_void_p),
    "fsync": (c_void_p,),
    "close": (c_void_p,),
}


class _Context:
    """One connection to an export; `call("mkdir", path)` calls nfs_mkdir. Errors: OSError."""

    def __init__(self, server: str, export: str) -> None:
        self._library = ctypes.CDLL(library().name)
        self._library.nfs_init_context.restype = c_void_p
        self._library.nfs_get_error.restype = c_char_p
        self._context = c_void_p(self._library.nfs_init_context())
        for name, types in _TYPES.items():
            getattr(self._library, f"nfs_{name}").argtypes = (c_void_p, *types)
        self._library.nfs_destroy_context.argtypes = self._library.nfs_get_error.argtypes = (c_void_p,)
        self.call("mount", server.encode(), export.encode())

    def call(self, name: str, *arguments: object) -> int:
        result = int(getattr(self._library, f"nfs_{name}")(self._context, *arguments))
        if result < 0:
            said = (self._library.nfs_get_error(self._context) or b"").decode(errors="replace")
            raise OSError(-result, f"nfs_{name}: {said}")
        return result

    def open(self, path: str, *, new: bool = False) -> c_void_p:
        file = c_void_p()
        if new:
            self.call("creat", path.encode(), 0o644, byref(file))
        else:
            self.call("open", path.encode(), os.O_RDWR, byref(file))
        return file

    def end(self) -> None:
        self._library.nfs_destroy_context(self._context)


def _each(server: str, export: str, threads: int, work: Callable[[_Context, int], None]) -> float:
    """Run work(context, number) in parallel threads, each with a connection opened before; return the seconds."""
    contexts = [_Context(server, export) for _ in range(threads)]
    try:
        return parallel(threads, lambda number: work(contexts[number], number))
    finally:
        for each in contexts:
            each.end()


def write_sequential(server: str, export: str, path: str, size: int) -> Answer:
    """Write a file 1 MiB at a time, fsync and close it. Its directory is created first."""
    first = _Context(server, export)
    first.call("mkdir", os.path.dirname(path).encode())
    first.call("close", first.open(path, new=True))
    first.end()

    def write(context: _Context, number: int) -> None:
        file = context.open(path)
        for at in range(number, size // BLOCK, CONNECTIONS):
            if context.call("pwrite", file, at * BLOCK, BLOCK, block(at)) != BLOCK:
                raise WrongContent(f"{path}: a short write")
        context.call("fsync", file)
        context.call("close", file)

    seconds = _each(server, export, CONNECTIONS, write)
    return {"began": 0.0, "closed": seconds}


def read_sequential(server: str, export: str, path: str, size: int, cap_s: float) -> Answer:
    """Read the whole file."""
    counts = [0] * CONNECTIONS
    deadline = time.monotonic() + cap_s

    def read(context: _Context, number: int) -> None:
        buffer = ctypes.create_string_buffer(BLOCK)
        file = context.open(path)
        for at in range(number, size // BLOCK, CONNECTIONS):
            if time.monotonic() > deadline:
                break
            count = context.call("pread", file, at * BLOCK, BLOCK, buffer)
            check_part(at * BLOCK, memoryview(buffer).cast("B")[:count], path)
            counts[number] += count
        context.call("close", file)

    seconds = _each(server, export, CONNECTIONS, read)
    return {"seconds": seconds, "bytes": sum(counts), "partial": sum(counts) < size}


def create_files(server: str, export: str, folder: str, count: int, size: int, threads: int, cap_s: float) -> Answer:
    """Create small files; a thread commits each before its next one."""
    first = _Context(server, export)
    first.call("mkdir", folder.encode())
    first.end()
    done = [0] * threads
    deadline = time.monotonic() + cap_s

    def create(context: _Context, first: int) -> None:
        for number in range(first, count, threads):
            if time.monotonic() > deadline:
                return
            file = context.open(f"{folder}/f{number:05}", new=True)
            if context.call("pwrite", file, 0, size, block(number, size)) != size:
                raise WrongContent(f"{folder}/f{number:05}: a short write")
            context.call("fsync", file)
            context.call("close", file)
            done[first] += 1

    seconds = _each(server, export, threads, create)
    return {"began": 0.0, "closed": seconds, "count": sum(done), "partial": sum(done) < count}


def read_files(server: str, export: str, folder: str, count: int, size: int, threads: int, cap_s: float) -> Answer:
    """Read whole small files; each thread takes every threads-th."""
    done = [0] * threads
    deadline = time.monotonic() + cap_s

    def read(context: _Context, first: int) -> None:
        buffer = ctypes.create_string_buffer(size + 1)
        for number in range(first, count, threads):
            if time.monotonic() > deadline:
                return
            file = context.open(f"{folder}/f{number:05}")
            got = context.call("pread", file, 0, size + 1, buffer)
            context.call("close", file)
            check_file(number, memoryview(buffer).cast("B")[:got], size, f"{folder}/f{number:05}")
            done[first] += 1

    seconds = _each(server, export, threads, read)
    return {"seconds": seconds, "count": sum(done), "partial": sum(done) < count}
