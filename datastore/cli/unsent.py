"""Changes of a mount that are not uploaded, read from its state directory when no server is there to be asked.

The mount server keeps them in the SQLite table `unsent` (see fuse/state/statedb.py), with the bytes
in staging/. It is opened read-only but to discard, and a living server is asked over its socket instead.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

STAGING = "staging"
MAX_SHOWN = 10_000
_MAGIC = b"SQLite format 3\0"
_TIMEOUT_S = 1.0


def unsent_files(state_dir: Path) -> list[dict[str, Any]]:
    """At most MAX_SHOWN changed files, as in a server's status: path, bytes, since (seconds), error or None.

    stuck: sending it again is no use, a person has to save or discard it. file: its bytes on this disk. missing: how
    many of them never came here from the object that was changed.
    """
    found: list[dict[str, Any]] = []
    for database in _databases(state_dir):
        for row in _query(database, "select * from unsent order by since_ns limit ?", MAX_SHOWN):
            file = state_dir / STAGING / Path(str(row["staging"])).name
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
    """Drop changed files of this path for good; how many there were. Only where no server is at work."""
    names = [each["staging"] for each in unsent_files(state_dir) if each["path"] == path]
    for database in _databases(state_dir):
        with closing(sqlite3.connect(database, timeout=_TIMEOUT_S, isolation_level=None)) as connection:
            connection.executemany("delete from unsent where staging=?", [(name,) for name in names])
    for name in names:
        (state_dir / STAGING / name).unlink(missing_ok=True)
    return len(names)


def remaining(state_dir: Path) -> int:
    """How many changed files are not uploaded."""
    counts = (_query(database, "select count(*) as files from unsent") for database in _databases(state_dir))
    return sum(int(rows[0]["files"]) for rows in counts if rows)


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
        # No such table, or written by another version: nothing that this command understands.
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _missing(file: Path, base_size: int) -> int:
    """Bytes of [0, base_size) that a sparse file does not hold (lseek(2), SEEK_DATA and SEEK_HOLE)."""
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
