"""Insert 1,000 rows, each in a transaction that SQLite makes durable with fsync: `sqlite_rows.py DIRECTORY`."""

import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

ROWS = 1000

path = Path(sys.argv[1], "rows.db")
started = time.monotonic()
with closing(sqlite3.connect(path, isolation_level=None)) as database:
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, text TEXT)")
    for number in range(ROWS):
        database.execute("INSERT INTO rows VALUES (?, ?)", (number, f"row {number} " * 20))
seconds = time.monotonic() - started
with closing(sqlite3.connect(path)) as database:
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert database.execute("SELECT count(*), sum(number) FROM rows").fetchone() == (ROWS, ROWS * (ROWS - 1) // 2)
print(seconds)
