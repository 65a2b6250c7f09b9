"""Copies the whole log of a pod into a Datastore that the pod has mounted: `spec.logs` of a TrainingJob.

A pod requests this with the volume LOGS_VOLUME (podrequests.py). A pod's log is copied only into a Datastore that the
same pod has mounted through this driver, so the request gives nobody new rights.

The log of a container is in /var/log/pods/NAMESPACE_POD_UID/CONTAINER/0.log, in the CRI's format: time, stream, P or F
(a part of a line, or its end), text (kubernetes/design-proposals-archive, "kubelet-cri-logging").
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from datastore.api.names import LOGS_VOLUME
from datastore.api.volumecontext import DRIVER, VolumeHandle
from datastore.errors import InvalidManifest
from datastore.logs import fields
from datastore.privatefile import write_text

from .podrequests import requests, uid_of

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
THREADS = 512
"""Each writes one pod's log at a time. A node has fewer pods (the kubelet allows 110 by default), so that no pod waits
for another pod's slow storage."""
FINISH_S = 60.0
"""How long the end of a pod waits for the rest of its log."""
CHUNK_BYTES = 1 << 20
WISH_BYTES = 4096
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID = re.compile(r"[0-9a-f-]{1,64}")


class PodLogs:
    """Copies the logs of this node's pods. pods, notes: see Settings.pods_dir and notes_dir; logs: /var/log/pods."""

    def __init__(self, pods: Path, logs: Path, notes: Path) -> None:
        self._pods, self._logs, self._notes = pods, logs, notes
        self._followed: dict[str, _Follower] = {}
        self._working: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pod-logs")

    def look(self) -> None:
        """Write new lines of every log, each log in its own thread. Call this every INTERVAL_S."""
        there = requests(self._pods, LOGS_VOLUME)
        with self._lock:
            for uid in [each for each in self._followed if not (self._pods / each).is_dir()]:
                if self._done(uid):
                    del self._working[uid]
                    self._pool.submit(self._followed.pop(uid).close)
                    (self._notes / uid).unlink(missing_ok=True)
            for uid, wish in there.items():
                follower = self._follower(uid, wish)
                if self._done(uid):
                    self._working[uid] = self._pool.submit(follower.copy)

    def close(self) -> None:
        """End the threads; the next plugin writes the rest of the logs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, target: str) -> None:
        """Write the rest of a pod's log before the pod's volume at this path is unmounted; wait FINISH_S at most. The
        kubelet may have removed the pod's other volumes by then, even that with the request."""
        uid = uid_of(self._pods, target)
        wish = self._pods / uid / "volumes" / "kubernetes.io~downward-api" / LOGS_VOLUME
        with self._lock:
            if uid == ".." or not (uid in self._followed or wish.is_dir()):
                return
            follower = self._follower(uid, wish)
            follower.ending = True
            earlier = self._working.get(uid)
        try:
            if earlier is not None:
                earlier.result(FINISH_S)
            with self._lock:
                if self._done(uid):
                    self._working[uid] = self._pool.submit(follower.end)
                last = self._working[uid]
            last.result(FINISH_S)
        except TimeoutError:
            log.warning("a pod's log is not whole: its storage does not answer", extra=fields(pod=uid))

    def _done(self, uid: str) -> bool:
        return uid not in self._working or self._working[uid].done()

    def _follower(self, uid: str, wish: Path) -> _Follower:
        if uid not in self._followed:
            self._followed[uid] = _Follower(self._pods / uid, wish, self._logs, self._notes / uid)
        return self._followed[uid]


class _Wish(NamedTuple):
    """A pod's request. directory: where the kubelet has the log's files; path: that of the copy, in the Datastore."""

    directory: Path
    datastore: str
    path: str


class _Follower:
    """Copies the log of one pod. Not thread-safe. ending: the pod's containers have ended, and only end() writes."""

    def __init__(self, pod: Path, wish: Path, logs: Path, note: Path) -> None:
        self._pod, self._wish, self._logs, self._note = pod, wish, logs, note
        self.ending = False
        self._wished: _Wish | None = None
        self._source: int | None = None
        self._target: int | None = None
        self._rest = b""
        self._refused = ""
        self._ended = False

    def end(self) -> None:
        """Write the rest of the log; nothing is written after that."""
        if not self._ended:
            self._copy()
        self._ended = True
        self.close()

    def copy(self) -> None:
        """Write what is new. An error is logged once, and the next call tries again."""
        if not self.ending:
            self._copy()

    def _copy(self) -> None:
        try:
            if self._target is None:
                self._begin()
            if self._source is not None:
                self._follow()
            self._refused = ""
        except (OSError, ValueError, InvalidManifest) as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("a pod's log is not written", extra=fields(pod=self._pod.name, reason=error))

    def close(self) -> None:
        """Close the files, so that the copy is uploaded."""
        for descriptor in (self._source, self._target):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._source = self._target = None

    def _begin(self) -> None:
        """Open the log and the copy, and write what the copy lacks: an earlier plugin may have written a part of it."""
        wished = self._read_wish()
        current = wished.directory / "0.log"
        if not current.exists():
            return  # the container has not started
        target = _open_below(self._mount(wished.datastore), wished.path)
        try:
            size = os.fstat(target).st_size
            if not self._note.exists():
                self._note.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._note, str(size))
            written = max(0, size - int(self._note.read_text()))
            source = os.open(current, os.O_RDONLY | os.O_CLOEXEC)
            self._rest = b""
            for chunk in _earlier(wished.directory, os.fstat(source).st_ino):
                written = _write(target, chunk, written)
            while data := os.read(source, CHUNK_BYTES):
                written = _write(target, self._text_of(data), written)
        except BaseException:
            os.close(target)
            raise
        self._source, self._target = source, target

    def _follow(self) -> None:
        assert self._source is not None
        assert self._target is not None
        current = self._read_wish().directory / "0.log"
        while True:
            while data := os.read(self._source, CHUNK_BYTES):
                _write(self._target, self._text_of(data), 0)
            try:
                found = current.stat()
            except FileNotFoundError:
                return
            if found.st_ino == os.fstat(self._source).st_ino:
                return
            # The kubelet has rotated the log: read the rest of the old file first.
            while data := os.read(self._source, CHUNK_BYTES):
                _write(self._target, self._text_of(data), 0)
            os.close(self._source)
            self._source = os.open(current, os.O_RDONLY | os.O_CLOEXEC)

    def _read_wish(self) -> _Wish:
        """Read and check the request, once, as its files may vanish before the log's end; its content is the pod's."""
        if self._wished is None:
            namespace, name, uid = _text(self._wish / "namespace"), _text(self._wish / "pod"), self._pod.name
            if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name) and _UID.fullmatch(uid)):
                raise ValueError("its names are no names of a pod")
            index = _text(self._wish / "index")
            if not index.isdigit():
                raise ValueError("its index is no number")
            match json.loads(_text(self._wish / "wanted")):
                case {"datastore": str(datastore), "path": str(path)}:
                    directory = self._logs / f"{namespace}_{name}_{uid}" / "main"
                    self._wished = _Wish(directory, datastore, f"{path}-{index}.log")
                case _:
                    raise ValueError("it does not say which Datastore and path it wants")
        return self._wished

    def _mount(self, datastore: str) -> Path:
        """Return the path where this pod has a Datastore mounted. Errors: ValueError."""
        for found in self._pod.glob("volumes/kubernetes.io~csi/*/vol_data.json"):
            about = json.loads(found.read_text())
            if about.get("driverName") != DRIVER:
                continue
            with contextlib.suppress(InvalidManifest):
                if VolumeHandle.parse(about["volumeHandle"]).name == datastore:
                    return found.parent / "mount"
        raise ValueError(f"the pod has no volume of ours of Datastore {datastore}")

    def _text_of(self, data: bytes) -> bytes:
        """Return what the container wrote, without the CRI's fields; a line whose end is missing is kept for later."""
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        return b"".join(_plain(line) for line in whole.split(b"\n")) if whole else b""


def _plain(line: bytes) -> bytes:
    parts = line.split(b" ", 3)
    if len(parts) < 3:
        return b""
    return (parts[3] if len(parts) > 3 else b"") + (b"" if parts[2].startswith(b"P") else b"\n")


def _earlier(directory: Path, current: int) -> Iterator[bytes]:
    """Yield the content of a log's rotated files, the oldest first, without the file with the inode `current`. The
    kubelet compresses NAME to NAME.tmp, renames that to NAME.gz, and then removes NAME."""
    found = sorted(directory.glob("0.log.*"))
    for path in found:
        if path.suffix == ".tmp" or path.with_name(f"{path.name}.gz") in found:
            continue
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino == current:
                continue
            for line in file:
                yield _plain(line.rstrip(b"\n"))


def _write(target: int, data: bytes, skipped: int) -> int:
    """Write all but the first `skipped` bytes; return how many more bytes of the next data have to be skipped."""
    left = memoryview(data)[skipped:]
    while left:
        left = left[os.write(target, left) :]
    return max(0, skipped - len(data))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(WISH_BYTES).decode().strip()


def _open_below(mount: Path, path: str) -> int:
    """Open a file for appending, and create it with its directories. Symbolic links are refused, because they may lead
    out of the mount. Errors: OSError; ValueError when it is no regular file below a mount."""
    *directories, name = [part for part in path.split("/") if part]
    if ".." in (*directories, name) or not os.path.ismount(mount):
        raise ValueError(f"{path} is no path below a mount")
    here = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for each in directories:
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o755, dir_fd=here)
            below = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        target = os.open(name, flags, 0o644, dir_fd=here)
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(target).st_mode):
        os.close(target)
        raise ValueError(f"{path} is no file")
    return target
