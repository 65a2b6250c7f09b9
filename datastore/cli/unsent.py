"""Changes of a mount that are not uploaded, read from its state directory when no server is there to be asked.

The mount server keeps them in the SQLite table `unsent` (staging, key, since_ns, error), with the bytes in staging/.
It is opened read-only, and a living server is asked over its socket instead.
"""

from __future__ import annotations

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
    """At most MAX_SHOWN changed files, as in a server's status: path, bytes, since (seconds), error or None."""
    found: list[dict[str, Any]] = []
    for database in _databases(state_dir):
        rows = _query(database, "select staging, key, since_ns, error from unsent order by since_ns limit ?", MAX_SHOWN)
        for staging, key, since_ns, error in rows:
            size = _size(state_dir / STAGING / Path(str(staging)).name)
            found.append({"path": str(key), "bytes": size, "since": since_ns / 1e9, "error": error or None})
    return found


def remaining(state_dir: Path) -> int:
    """How many changed files are not uploaded."""
    counts = (_query(database, "select count(*) from unsent") for database in _databases(state_dir))
    return sum(int(rows[0][0]) for rows in counts if rows)


def _databases(state_dir: Path) -> list[Path]:
    return [each for each in sorted(state_dir.glob("*.db*")) if each.is_file() and _is_database(each)]


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _query(database: Path, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=_TIMEOUT_S)
        ) as connection:
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            return connection.execute(statement, parameters).fetchall()
    except sqlite3.Error:
        # No such table, or written by another version: nothing that this command understands.
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
