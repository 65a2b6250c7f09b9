"""The database of one mount: what it was told, it tells the next process."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from datastore.fuse.state import statedb, youngrows
from datastore.fuse.state.rows import Unsent
from datastore.fuse.state.statedb import KnownAttributes, StateDb
from tests.promises import promise

Reopened = Callable[[], StateDb]
ODD_KEY = os.fsdecode(b"raw\xff/\xe2\x82\xac")


def row(staging: str, key: str = "d/f", since_ns: int = 1, error: str = "") -> Unsent:
    return Unsent(
        staging, key, "base", "etag", 100, 90, {"mode": "33188", "x": "\u00e4"}, "text/plain", since_ns, error
    )


class FullDisk:
    """A connection that can't write."""

    in_transaction = False

    def execute(self, statement: str, row: object = ()) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error


class ReadableFullDisk(FullDisk):
    """One that can read."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def execute(self, statement: str, row: object = ()) -> sqlite3.Cursor:  # type: ignore[override]
        if not statement.startswith("select"):
            super().execute(statement)
        return self._real.execute(statement)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def db(path: Path) -> Iterator[StateDb]:
    opened = StateDb(path)
    yield opened
    opened.close()


@pytest.fixture
def reopened(path: Path) -> Iterator[Reopened]:
    """Opens it as the next process does."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(StateDb(path)))


@contextmanager
def full_disk(db: StateDb, monkeypatch: pytest.MonkeyPatch, *, readable: bool = False) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(db, "_connection", ReadableFullDisk(db._connection) if readable else FullDisk())
        yield


@promise("S-20", "S-50")
def test_a_row_recorded_anew_outlives_a_forgetting_that_failed(
    path: Path, db: StateDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent on a full disk and then written again: the next file that was sent took its row along."""
    db.record_unsent(row("a"))
    with full_disk(db, monkeypatch):
        db.forget_unsent("a")
    assert db.unsent() == []
    db.record_unsent(row("a"))
    db.forget_unsent("b")
    assert [one.staging for one in db.unsent()] == ["a"]


@promise("S-19", "S-50")
def test_a_full_disk_does_not_keep_a_reason(db: StateDb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a file could not be sent is no reason to stop: who tries again later must live on."""
    db.record_unsent(row("a"))
    with full_disk(db, monkeypatch):
        db.failed_unsent("a", "the server is down", stuck=False)
    assert [one.staging for one in db.unsent()] == ["a"]


@promise("S-20")
def test_rows_of_removed_files_go_together(path: Path, db: StateDb) -> None:
    """They count for nothing meanwhile, and a clean end leaves none."""
    db.record_unsent(row("kept"))
    for number in range(100):
        db.record_unsent(row(f"{number}"), lasting=True)
        db.forget_unsent(f"{number}", removed=True)
        assert [one.staging for one in db.unsent()] == ["kept"]
    assert 1 < len(in_table(path)) < 65
    db.close()
    assert in_table(path) == ["kept"]


def in_table(path: Path) -> list[str]:
    """What a commit has put there."""
    with closing(sqlite3.connect(path)) as raw:
        return [staging for (staging,) in raw.execute("select staging from unsent order by staging")]


@promise("S-20")
def test_a_young_row_is_no_transaction(path: Path, reopened: Reopened, db: StateDb) -> None:
    """It outlives its process all the same; a row that is to outlive a power cut is a transaction."""
    rows = [row("b", key=ODD_KEY, since_ns=2), row("a", since_ns=1)._replace(expects="")]
    for one in rows:
        db.record_unsent(one)
    db.record_unsent(row("gone"))
    db.forget_unsent("gone")
    db.record_unsent(row("sent"))
    db.forget_unsent("sent", removed=True)  # not said: the file is not there
    assert in_table(path) == []
    db.record_unsent(row("a", since_ns=1, error="refused"), lasting=True)
    assert in_table(path) == ["a"]
    second = reopened()
    assert [one.staging for one in second.unsent()] == ["a", "sent", "b"]
    assert second.unsent()[0].error == "refused"
    assert second.unsent()[2] == rows[0]
    assert in_table(path) == ["a", "b", "sent"]


@promise("S-20")
def test_a_young_row_of_a_later_release_is_a_row(path: Path, reopened: Reopened, db: StateDb) -> None:
    """A step back to this release loses no bytes."""
    db.record_unsent(row("a"))
    log = path.with_name(youngrows.NAME)
    log.write_text(json.dumps({**json.loads(log.read_text()), "invented": 1}) + "\n")
    second = reopened()
    assert [one.staging for one in second.unsent()] == ["a"]


@promise("S-20")
def test_a_damaged_log_gives_what_is_whole(path: Path, reopened: Reopened, db: StateDb) -> None:
    """A power cut may leave anything at its end."""
    db.record_unsent(row("a"))
    log = path.with_name("unsent.log")
    with log.open("ab") as file:
        file.write(b"\0" * 50 + b'\n{"staging": "x"}\n{"staging": "cut", "key": "')
    again = reopened()
    assert [one.staging for one in again.unsent()] == ["a"]
    assert log.stat().st_size == 0


@promise("S-19")
def test_a_row_after_a_torn_end_is_kept(
    path: Path, reopened: Reopened, db: StateDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database could not take the log over, as the disk was full; then there was room again."""
    db.record_unsent(row("a"))
    with path.with_name("unsent.log").open("ab") as file:
        file.write(b'{"staging": "cut", "key": "')

    def full(*_: object) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(StateDb, "_take_young", full)
        second = reopened()
    second.record_unsent(row("b"))
    assert sorted(one.staging for one in reopened().unsent()) == ["a", "b"]


@promise("S-50")
def test_a_full_disk_refuses_a_young_row_and_keeps_the_others(
    reopened: Reopened, db: StateDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC to who writes; half a line is taken back; what was forgotten meanwhile is said later."""
    db.record_unsent(row("a"))
    db.record_unsent(row("b"))
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, text: real(fd, text[:10]))
        with pytest.raises(OSError, match="full"):
            db.record_unsent(row("c"))
        db.forget_unsent("a")
    assert [one.staging for one in db.unsent()] == ["b"]
    db.record_unsent(row("d"))
    again = reopened()
    assert sorted(one.staging for one in again.unsent()) == ["b", "d"]


@promise("S-19")
def test_the_log_does_not_grow_for_ever(path: Path, db: StateDb, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew when nothing is young, and else when it is long: the database takes what is there."""
    monkeypatch.setattr(youngrows, "_EMPTIED_BYTES", 2000)
    monkeypatch.setattr(statedb, "LONG_BYTES", 20_000)
    log = path.with_name("unsent.log")
    for number in range(100):
        db.record_unsent(row(f"{number}"))
        db.forget_unsent(f"{number}", removed=True)
        assert log.stat().st_size < 3000
    db.record_unsent(row("kept"))
    for number in range(200):
        db.record_unsent(row(f"{number}"))
        db.forget_unsent(f"{number}")
        assert log.stat().st_size < 21_000
    assert in_table(path) == ["kept"]
    assert [one.staging for one in db.unsent()] == ["kept"]


@promise("S-12")
def test_old_attributes_are_dropped(path: Path, db: StateDb) -> None:
    """The memory on disk is bounded."""
    known = KnownAttributes("e", 5, {}, "")
    db.remember_attributes([(f"f{number}", known) for number in range(100)])
    db.close()
    small = StateDb(path, attribute_rows=50)
    assert sum(small.attributes(f"f{number}") is not None for number in range(100)) == 25
    small.close()


@promise("S-12")
def test_the_rows_stay_bounded_while_it_is_open(path: Path) -> None:
    """Not only when the next server opens it; the same rows written again are not more of them."""
    known = KnownAttributes("e", 5, {}, "")
    small = StateDb(path, attribute_rows=50)
    for _ in range(10):
        small.remember_attributes([(f"g{number}", known) for number in range(30)])
    assert all(small.attributes(f"g{number}") is not None for number in range(30))
    for turn in range(40):
        small.remember_attributes([(f"f{turn}-{number}", known) for number in range(10)])
    with closing(sqlite3.connect(path)) as looking:
        rows = looking.execute("select count(*) from attributes").fetchone()[0]
    assert 25 <= rows <= 60
    small.close()


@promise("S-19")
def test_the_write_ahead_log_shrinks_again(path: Path, db: StateDb) -> None:
    """A burst of changes does not leave its size behind."""
    known = KnownAttributes("e", 5, {"x": "y" * 2000}, "")
    db.remember_attributes([(f"f{number}", known) for number in range(8000)])
    wal = path.with_name(f"{path.name}-wal")
    assert wal.stat().st_size > 8 << 20
    for number in range(3):
        db.remember_attributes([(f"g{number}", known)])
    assert wal.stat().st_size <= 4 << 20


@promise("S-12")
def test_a_transaction_that_fails_changes_nothing(db: StateDb) -> None:
    """All of a batch, or nothing of it."""
    known = KnownAttributes("e", 5, {}, "")
    broken = known._replace(etag=None)  # type: ignore[arg-type]
    with pytest.raises(sqlite3.IntegrityError):
        db.remember_attributes([("f", known), ("g", broken)])
    assert db.attributes("f") is None
    db.remember_attributes([("f", known)])
    assert db.attributes("f") == known


@promise("S-19")
def test_many_threads(db: StateDb) -> None:
    """One connection serves all."""

    def work(number: int) -> None:
        for turn in range(50):
            db.record_unsent(row(f"{number}-{turn}"))
            db.attributes("f")
            db.end(db.begin("discard", f"{number}", ""))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(db.unsent()) == 200
    assert db.intents() == []


@promise("S-50")
def test_syncs_that_come_together_are_one(db: StateDb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller's row is on the disk when its call returns."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    db.record_unsent(row("a"))
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda _: db.sync(), range(20)))
    assert 1 <= len(synced) <= 20
    before = len(synced)
    db.sync()
    assert len(synced) == before + 1


@promise("S-205")
def test_on_a_full_disk_they_are_not_used(db: StateDb, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownAttributes("e", 1, {"mode": "33188"}, "text/plain")
    db.attributes_are_of("alice")
    db.remember_attributes([("f", known)])
    with full_disk(db, monkeypatch, readable=True):
        db.attributes_are_of("bob")
    assert db.attributes("f") is None
    db.attributes_are_of("bob")
    assert db.attributes("f") is None
    db.remember_attributes([("f", known)])
    assert db.attributes("f") == known
