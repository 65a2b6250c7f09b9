"""The state database of one mount: the journal of unsent files, multipart uploads and intents, and known attributes.

It has local state only: the objects are the truth. In WAL mode with synchronous=NORMAL a commit survives the death of
our processes at once, and a power cut after the next checkpoint or sync(). All threads share one connection under a
lock; a call takes a few microseconds to a few hundred.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from datastore.ourprocess import boot_id

from ..store.base import UploadId
from .nodelog import NodeRecord
from .rows import NOWHERE, Intent, NotedUpload, Subject, Unsent, UploadNote, as_stored, as_text
from .youngrows import LONG_BYTES, NAME, YoungRows

_LOCK_TIMEOUT_S = 2.0
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""Errors of a full disk. The second: there was no room for the index of the write-ahead log."""
_WAL_BYTES = 4 << 20
"""The most bytes of the write-ahead log after a checkpoint; SQLite makes a checkpoint every 1000 pages, about 4 MiB."""
_FORGOTTEN_MAX = 64
"""How many rows of removed staging files may stay before all of them are deleted in one transaction."""

_SCHEMA = """
-- A file whose bytes are not all in the store. One row per staging file.
create table if not exists unsent(
  staging text primary key,        -- name of the file in staging/
  key text not null,               -- where it is to be written; follows renames
  base_key text not null,          -- the object its unchanged ranges come from, '' when it needs none
  base_etag text not null,         -- that object's version
  base_length integer not null,    -- that object's size
  base_size integer not null,      -- bytes of it that are still part of the file
  metadata text not null,          -- JSON of the user metadata to write
  content_type text not null,
  since_ns integer not null,       -- when it was first changed
  error text not null default '',  -- why the last upload failed, one line
  expects text,                    -- the version to replace, '' for none at all; null: whatever is there
  stuck integer not null default 0, -- sending it again is no use: a person saves or discards it
  unsynced integer not null default 0 -- the machine went down before the file was sure to be on the disk
);
-- The kernel's start that this database was last used in; one row.
create table if not exists boots(id text not null);
create table if not exists readers(id text not null); -- whose credentials the attributes were told, one row
-- A multipart upload that is neither completed nor aborted. upload_id '': no answer came, it may exist.
create table if not exists uploads(
  id integer primary key autoincrement, key text not null, upload_id text not null default '',
  since_ns integer not null);      -- our clock before it was begun
-- Something begun that must be finished; intent: JSON of a rows.Intent without its id.
create table if not exists begun(id integer primary key autoincrement, intent text not null);
-- User metadata of an object, by version; mtime_s is its Last-Modified.
create table if not exists attributes(
  key text primary key, etag text not null, mtime_s integer not null, metadata text not null, content_type text not null
) without rowid;
"""


class KnownAttributes(NamedTuple):
    """One row of the table `attributes`."""

    etag: str
    mtime_s: int
    metadata: dict[str, str]
    content_type: str


class StateDb:
    """The database, which is made if there is none. Safe for threads. Errors: OSError if it can't be opened."""

    def __init__(self, path: Path, *, attribute_rows: int = 2_000_000) -> None:
        self._lock = threading.RLock()
        with _disk_errors():
            self._connection = _connect(path)
            self._connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            self._connection.execute("pragma journal_mode=wal")
            self._connection.execute("pragma synchronous=normal")
            self._connection.execute(f"pragma journal_size_limit={_WAL_BYTES}")
            self._connection.executescript(_SCHEMA)
        self._forgotten: set[str] = set()
        """The staging files whose rows count no more but are not deleted yet."""
        self._ended: set[int] = set()
        """The ended intents whose rows are not deleted yet."""
        self._rows = {row[0] for row in self._connection.execute("select staging from unsent")}
        """The staging files with a row in the database."""
        last = self._connection.execute("select id from boots").fetchone()
        self.rebooted = last is not None and last[0] != boot_id()
        """Whether the machine has rebooted since the last seen_boot(), so that the latest commits may be missing."""
        self._young = YoungRows(path.with_name(NAME))
        young = (row._replace(unsynced=row.unsynced or self.rebooted) for row in self._young.load())
        self._young.rows = {row.staging: row for row in young if row.staging not in self._rows}
        with suppress(OSError):  # the disk is full: the young rows stay in their log
            self._take_young()
        self._wal_path = f"{path}-wal"
        self._wal = -1
        self._syncing = threading.Lock()
        self._synced = self._wanted = 0
        self._attribute_rows = attribute_rows
        self._anothers_attributes = False
        """Whether the attributes in the database were read with other credentials and could not be deleted."""
        self.attributes_at_most = 0
        """An upper bound of the rows of `attributes`: their number when last counted, and all writes since."""
        self._trim_attributes()

    def close(self) -> None:
        """Write what is pending, and close the database. Idempotent."""
        with self._lock:
            with suppress(OSError, sqlite3.ProgrammingError):  # the disk is full; the database is closed already
                self.drop_forgotten()
                self._take_young()
            self._young.close()
            self._connection.close()
            wal, self._wal = self._wal, -1
        if wal >= 0:
            os.close(wal)

    def sync(self) -> None:
        """Bring all commits to the disk itself; simultaneous calls share one sync. Errors: OSError.
        A commit is in the write-ahead log, which SQLite syncs only before it moves pages into the database."""
        with self._lock:
            self._wanted = mine = self._wanted + 1
        with self._syncing:
            if self._synced >= mine:
                return
            with self._lock:
                reached = self._wanted
            if self._wal < 0:
                self._wal = os.open(self._wal_path, os.O_RDONLY | os.O_CLOEXEC)
            os.fdatasync(self._wal)
            self._synced = reached

    def seen_boot(self) -> None:
        """Record that the effects of a reboot have been dealt with; with a full disk the next mount does so again."""
        with self._lock, suppress(OSError), self._transaction():
            self._connection.execute("delete from boots")
            self._connection.execute("insert into boots values(?)", (boot_id(),))
            self.rebooted = False

    # -- unsent files

    def record_unsent(self, row: Unsent, *, lasting: bool = False) -> None:
        """Insert a row, or replace that of the same staging file. Errors: OSError(ENOSPC) when the disk is full.
        lasting: put the row where sync() brings it to the disk itself; else it may be a young row (youngrows.py)."""
        with self._lock:
            if self._young.size > LONG_BYTES:
                self._take_young()
            if lasting or row.staging in self._rows:
                self._insert([row])
                self._young.drop(row.staging)
            else:
                self._young.put(row)
            self._forgotten.discard(row.staging)

    def _insert(self, rows: Sequence[Unsent]) -> None:
        values = [
            (*row[:1], as_stored(row.key), as_stored(row.base_key), *row[3:6], json.dumps(row.metadata), *row[7:])
            for row in rows
        ]
        with self._transaction():
            marks = ",".join("?" * len(Unsent._fields))
            self._connection.executemany(f"insert or replace into unsent values({marks})", values)
        self._rows.update(row.staging for row in rows)

    def _take_young(self, staging: str | None = None) -> None:
        """Move all young rows, or that of one staging file, into the database. Errors: OSError; they stay then."""
        young = self._young.rows
        rows = list(young.values()) if staging is None else [young[staging]] if staging in young else []
        if rows:
            self._insert(rows)
        if staging is None:
            self._young.clear()
        else:
            self._young.drop(staging)

    def forget_unsent(self, staging: str, *, removed: bool = False) -> None:
        """Drop a row: the bytes are in the store, or not wanted any more. A full disk only delays the deletion.
        removed: the staging file is removed already; a row without its file counts for nothing, so it may stay."""
        with self._lock:
            self._young.drop(staging, removed=removed)
            if staging in self._rows:
                self._forgotten.add(staging)
                if not removed or len(self._forgotten) >= _FORGOTTEN_MAX:
                    self.drop_forgotten()

    def drop_forgotten(self) -> None:
        """Delete the rows of forgotten files and ended intents; with a full disk they stay for the next call."""
        with self._lock:
            if not self._forgotten and not self._ended:
                return
            with suppress(OSError):
                with self._transaction():
                    gone = [(name,) for name in self._forgotten]
                    self._connection.executemany("delete from unsent where staging=?", gone)
                    self._connection.executemany("delete from begun where id=?", [(id,) for id in self._ended])
                self._rows -= self._forgotten
                self._forgotten.clear()
                self._ended.clear()

    def failed_unsent(self, staging: str, error: str, *, stuck: bool) -> None:
        """Record why a file that belongs to no node could not be sent; on a full disk this does nothing."""
        with self._lock, suppress(OSError):
            self._take_young(staging)
            self._execute("update unsent set error=?, stuck=? where staging=?", (error, stuck, staging))

    def unsent(self) -> list[Unsent]:
        """Return all rows, oldest first."""
        with self._lock:
            rows = map(_unsent, self._connection.execute("select * from unsent"))
            lasting = [row for row in rows if row.staging not in self._forgotten]
            return sorted([*lasting, *self._young.rows.values()], key=lambda row: row.since_ns)

    # -- multipart uploads

    def upload_begun(self, key: str, since_ns: int) -> UploadNote:
        """Record, before the request, that an upload will be created; return its note. With a full disk it is not
        recorded: what fills the disk must be sent. If all processes die then, nobody aborts the upload."""
        with suppress(OSError):
            return UploadNote(
                self._execute("insert into uploads(key, since_ns) values(?,?)", (as_stored(key), since_ns))
            )
        return UploadNote(0)

    def upload_known(self, note: UploadNote, upload_id: UploadId) -> None:
        """Record the id that the store gave an upload; with a full disk the upload is found by its key later."""
        with suppress(OSError):
            self._execute("update uploads set upload_id=? where id=?", (upload_id, note))

    def upload_ended(self, note: UploadNote) -> None:
        """Drop an upload that was completed or aborted; with a full disk the next start tries to abort it again."""
        with suppress(OSError):
            self._execute("delete from uploads where id=?", (note,))

    def uploads(self) -> list[NotedUpload]:
        """Return all uploads that were begun and not ended."""
        with self._lock:
            rows = self._connection.execute("select id, key, upload_id, since_ns from uploads order by id").fetchall()
        return [NotedUpload(note, as_text(key), upload_id, since_ns) for note, key, upload_id, since_ns in rows]

    # -- intents

    def begin(
        self,
        kind: str,
        source: str,
        target: str,
        move: NodeRecord = NOWHERE,
        subject: Subject | None = None,
        request: int = 0,
    ) -> Intent:
        """Record a change before it is made. move: the record that the node will have then. Errors: OSError."""
        intent = Intent(0, kind, source, target, move, subject or Subject(), request)
        return intent._replace(id=self._execute("insert into begun(intent) values(?)", (_stored_intent(intent),)))

    def put_off(self, intent: Intent, now_ns: int) -> Intent:
        """Record that an intent was postponed; its names may be used again, so it is not about what is written from now
        on. Return the new intent. Errors: OSError."""
        later = intent._replace(subject=intent.subject._replace(put_off_ns=intent.subject.put_off_ns or now_ns))
        self._update_intent(later)
        return later

    def _update_intent(self, intent: Intent) -> None:
        self._execute("update begun set intent=? where id=?", (_stored_intent(intent), intent.id))

    def moved(self, intent: Intent, etag: str, settled: Sequence[str] = ()) -> None:
        """Record that the file of a 'rename-file' is at the target, so that only the source is left to be removed.
        etag: the source's version, '' if it is not known. settled: the staging files whose rows are deleted, because
        the rename has sent their bytes to the target or replaced them. Errors: OSError."""
        with self._lock:
            for staging in settled:
                self._take_young(staging)  # only rows in the database can be part of the transaction
            with self._transaction():
                self._update_intent(intent._replace(kind="remove", target=etag))
                self._connection.executemany("delete from unsent where staging=?", [(name,) for name in settled])
            self._rows.difference_update(settled)
            self._forgotten.difference_update(settled)

    def end(self, intent: Intent) -> None:
        """Drop an intent that is done or was undone; with a full disk this process deletes its row later."""
        with self._lock:
            self._ended.add(intent.id)
            self.drop_forgotten()

    def intents(self) -> list[Intent]:
        """Return the intents that were begun and not ended, in the order of their begin."""
        with self._lock:
            rows = self._connection.execute("select id, intent from begun order by id").fetchall()
        return [_intent(*row) for row in rows if row[0] not in self._ended]

    # -- attributes

    def attributes_are_of(self, reader: str) -> None:
        """Delete the attributes if they were read with other credentials than `reader`; on a full disk, ignore them."""
        with self._lock:
            last = self._connection.execute("select id from readers").fetchone()
            if last is not None and last[0] == reader:
                return
            self._anothers_attributes = True
            with suppress(OSError), self._transaction():
                self._connection.execute("delete from attributes")
                self._connection.execute("delete from readers")
                self._connection.execute("insert into readers values(?)", (reader,))
                self._anothers_attributes, self.attributes_at_most = False, 0

    def attributes(self, key: str) -> KnownAttributes | None:
        """Return what is known of an object, of whatever version."""
        if self._anothers_attributes:
            return None
        with self._lock:
            row = self._connection.execute(
                "select etag, mtime_s, metadata, content_type from attributes where key=?", (as_stored(key),)
            ).fetchone()
        return None if row is None else KnownAttributes(row[0], row[1], json.loads(row[2]), row[3])

    def remember_attributes(self, rows: Sequence[tuple[str, KnownAttributes]], removed: Sequence[str] = ()) -> None:
        """Store rows and delete those of removed or changed objects, in one transaction. Errors: OSError."""
        values = [(as_stored(key), a.etag, a.mtime_s, json.dumps(a.metadata), a.content_type) for key, a in rows]
        with self._transaction():
            self._connection.executemany("insert or replace into attributes values(?,?,?,?,?)", values)
            self._connection.executemany("delete from attributes where key=?", [(as_stored(key),) for key in removed])
            self.attributes_at_most += len(values)
            if self.attributes_at_most > self._attribute_rows:
                self._trim_attributes()

    def _trim_attributes(self) -> None:
        """Count the rows; at 3/4 of the limit delete down to a half, so that they need not be counted often."""
        (count,) = self._connection.execute("select count(*) from attributes").fetchone()
        if count > self._attribute_rows * 3 // 4:
            surplus = count - self._attribute_rows // 2
            self._connection.execute(
                "delete from attributes where key in (select key from attributes limit ?)", (surplus,)
            )
            count -= surplus
        self.attributes_at_most = count

    def _execute(self, statement: str, values: tuple[object, ...]) -> int:
        """Execute a statement that changes rows; return the id of the row if one is inserted. Errors: OSError."""
        with self._lock, _disk_errors():
            return self._connection.execute(statement, values).lastrowid or 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, _disk_errors():
            self._connection.execute("begin")
            try:
                yield
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:  # not if SQLite has rolled back by itself
                    self._connection.execute("rollback")
                raise


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an OperationalError of SQLite into an OSError: ENOSPC when the disk is full, EIO otherwise."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode in _FULL:
            raise OSError(errno.ENOSPC, "the disk of the state directory is full") from error
        raise OSError(errno.EIO, f"the journal cannot be written: {error}") from error


def _unsent(row: tuple[Any, ...]) -> Unsent:
    found = Unsent(*row)
    return found._replace(
        key=as_text(found.key),
        base_key=as_text(found.base_key),
        metadata=json.loads(row[6]),
        stuck=bool(found.stuck),
        unsynced=bool(found.unsynced),
    )


def _stored_intent(intent: Intent) -> str:
    move = [*intent.move[:4], as_text(intent.move.name)]
    return json.dumps([*intent[1:4], move, intent.subject, intent.request])


def _intent(number: int, stored: str) -> Intent:
    kind, source, target, move, subject, request = json.loads(stored)
    record = NodeRecord(*move)._replace(name=move[-1].encode("utf-8", "surrogateescape"))
    return Intent(number, kind, source, target, record, Subject(*subject), request)


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database, also if a server that died still locks it.

    A dead server holds its locks while the kernel keeps one of its threads, which waits for an answer that only the new
    server can give (supervisor/serverprocess.py). It never writes again, so a copy of the files becomes the database.
    """
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_LOCK_TIMEOUT_S)
    try:
        connection.execute("pragma journal_mode=wal")
        connection.execute("begin immediate")
        connection.execute("rollback")
    except sqlite3.OperationalError as error:
        connection.close()
        if "locked" not in str(error):
            raise
        for suffix in ("", "-wal"):
            there = path.with_name(path.name + suffix)
            if there.exists():
                shutil.copyfile(there, path.with_name(f"{path.name}.copy{suffix}"))
        for suffix in ("-wal", ""):
            path.with_name(f"{path.name}.copy{suffix}").replace(path.with_name(path.name + suffix))
        path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_LOCK_TIMEOUT_S)
    return connection
