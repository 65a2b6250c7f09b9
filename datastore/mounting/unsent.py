"""Reads the changes that a mount has not uploaded from its state directory, when no server can be asked for them.

The mount server keeps them in the SQLite table `unsent` (fuse/state/statedb.py), or in a log while they are young
(fuse/state/youngrows.py), and their bytes in staging files. Only discard() opens the table for writing. A server that
lives is asked over its socket instead. A row whose staging file is removed does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

STAGING = "staging"
_LOG = "unsent.log"
MAX_SHOWN = 10_000
_MAGIC = b"SQLite format 3\0"
_TIMEOUT_S = 1.0


def unsent_files(state_dir: Path, *, every: bool = False) -> list[dict[str, Any]]:
    """Return the changed files, at most MAX_SHOWN unless `every` is set, as in a server's status: path, bytes, since
    (seconds), error or None. stuck: a retry is no use, so a person has to save or discard the file. staging, file: the
    name and the path of the staging file. missing: how many of its bytes were never fetched from the object that was
    changed."""
    found: list[dict[str, Any]] = []
    rows = _rows(state_dir)
    for row in rows if every else rows[:MAX_SHOWN]:
        file = _file(state_dir, row)
        size = _size(file)
        found.append(
            {
                "path": str(row["key"]),
                "bytes": size,
                "since": row["since_ns"] / 1e9,
                "error": row["error"] or None,
                "stuck": bool(row.get("stuck")),
                "staging": file.name,
                "file": str(file),
                "missing": _missing(file, min(row.get("base_size", 0), size)),
            }
        )
    return found


def discard(state_dir: Path, path: str) -> int:
    """Drop the changed files of this path for good; return how many. Only to be called while no server runs."""
    names = [_file(state_dir, row).name for row in _rows(state_dir) if str(row["key"]) == path]
    for database in _databases(state_dir):
        with closing(sqlite3.connect(database, timeout=_TIMEOUT_S, isolation_level=None)) as connection:
            connection.executemany("delete from unsent where staging=?", [(name,) for name in names])
    for name in names:
        (state_dir / STAGING / name).unlink(missing_ok=True)
    return len(names)


def remaining(state_dir: Path) -> int:
    """Return how many changed files are not uploaded."""
    return len(_rows(state_dir))


def _rows(state_dir: Path) -> list[dict[str, Any]]:
    """Return the rows whose staging files exist, the oldest first. A row of the table wins over one of the log."""
    found = _young(state_dir / _LOG)
    for database in _databases(state_dir):
        found.update((str(row["staging"]), row) for row in _query(database, "select * from unsent"))
    there = [row for row in found.values() if _file(state_dir, row).exists()]
    return sorted(there, key=lambda row: int(row["since_ns"]))


def _file(state_dir: Path, row: dict[str, Any]) -> Path:
    return state_dir / STAGING / Path(str(row["staging"])).name


def _young(log: Path) -> dict[str, dict[str, Any]]:
    """Return the log's rows by staging file. A line of the log is a row, or the name of a file whose row is dropped."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        for text in log.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, str):
                    found.pop(line, None)
                elif isinstance(line, dict) and {"staging", "key", "since_ns", "error"} <= line.keys():
                    line["key"] = os.fsencode(str(line["key"])).decode(errors="replace")
                    found[str(line["staging"])] = line
    return found


def _databases(state_dir: Path) -> list[Path]:
    return [each for each in sorted(state_dir.glob("*.db*")) if each.is_file() and _is_database(each)]


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _query(database: Path, statement: str, *parameters: object) -> list[dict[str, Any]]:
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=_TIMEOUT_S)
        ) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            return [dict(row) for row in connection.execute(statement, parameters)]
    except sqlite3.Error:
        # There is no such table, or another version with another format wrote it.
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _missing(file: Path, base_size: int) -> int:
    """Return how many bytes of [0, base_size) are holes in a sparse file (lseek(2), SEEK_DATA and SEEK_HOLE)."""
    at = missing = 0
    try:
        with file.open("rb", buffering=0) as content:
            while at < base_size:
                start = _seek(content.fileno(), at, os.SEEK_DATA, base_size)
                missing += start - at
                at = _seek(content.fileno(), start, os.SEEK_HOLE, base_size)
    except OSError:
        return 0
    return missing


def _seek(fd: int, at: int, whence: int, end: int) -> int:
    try:
        return min(os.lseek(fd, at, whence), end)
    except OSError:
        return end
