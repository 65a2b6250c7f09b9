"""Copies the whole log of each replica to the Datastore of spec.logs, in a thread, as the storage may be slow."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

INTERVAL_S = 2.0
STOP_TIMEOUT_S = 120.0
_CHUNK = 1 << 20


class LogCopies:
    """A thread that copies what is appended to files, until stop(). files: the target of each source."""

    def __init__(self, files: Mapping[Path, Path]) -> None:
        self._files = dict(files)
        self._copied = dict.fromkeys(files, 0)
        self._stopping = threading.Event()
        self._open: dict[Path, BinaryIO] = {}
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, name="log-copies", daemon=True)
        self._thread.start()

    def copied(self, source: Path) -> int:
        """Return how many bytes of a log are copied."""
        return self._copied[source]

    def stop(self) -> str:
        """Copy the rest, within STOP_TIMEOUT_S; return why not all is copied, or ''."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        return "the storage does not answer" if self._thread.is_alive() else self._trouble

    def _work(self) -> None:
        while True:
            last = self._stopping.wait(INTERVAL_S)
            try:
                for source, target in self._files.items():
                    self._copy(source, target)
                self._trouble = ""
            except OSError as error:
                self._trouble = f"{error.filename or ''}: {error.strerror}"
            if last:
                self._close()
                return

    def _copy(self, source: Path, target: Path) -> None:
        """Copy what is new. The target stays open, as the mount uploads open files that only grow (S-44)."""
        if not source.exists() or source.stat().st_size <= self._copied[source]:
            return
        if source not in self._open:
            target.parent.mkdir(parents=True, exist_ok=True)
            # After a suspension, what the log has no more is in the copy; without that, the copy is an earlier job's.
            self._open[source] = target.open("ab" if _begins_with_hole(source) else "wb", buffering=0)
            self._copied[source] = self._open[source].tell()
        with source.open("rb") as reading:
            reading.seek(self._copied[source])
            while chunk := reading.read(_CHUNK):
                self._open[source].write(chunk)
                self._copied[source] += len(chunk)

    def _close(self) -> None:
        for file in self._open.values():
            try:
                file.close()
            except OSError as error:
                self._trouble = f"{error.filename or ''}: {error.strerror}"


def _begins_with_hole(log: Path) -> bool:
    """Whether the oldest part was given back to the disk (Replica.trim_log), which is done once it is copied."""
    with log.open("rb") as file:
        return os.lseek(file.fileno(), 0, os.SEEK_DATA) > 0
