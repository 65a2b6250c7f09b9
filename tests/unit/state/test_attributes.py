"""What is remembered of a HEAD, and for how long it is right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from datastore.fuse.state.attributes import AttributeMemory, is_racy
from datastore.fuse.state.statedb import KnownAttributes, StateDb
from datastore.fuse.store.base import ETag, ObjectInfo
from tests.driving import resolve, the_loop
from tests.patience import eventually
from tests.promises import promise

S = 1_000_000_000
E1, E2 = ETag("e1"), ETag("e2")


def info(
    key: str = "f", etag: ETag = E1, mtime_ns: int = 10 * S, answered_ns: int = 20 * S, **metadata: str
) -> ObjectInfo:
    return ObjectInfo(key, 1, etag, mtime_ns, answered_ns, metadata, "a/b")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[StateDb]:
    opened = StateDb(tmp_path / "state.db")
    yield opened
    opened.close()


@pytest.fixture
def memory(db: StateDb) -> AttributeMemory:
    return AttributeMemory(db, the_loop())


@promise("S-12")
@pytest.mark.parametrize(
    ("mtime_ns", "answered_ns", "racy"),
    [(10 * S, at_ns, True) for at_ns in (10 * S, 11 * S - 1, 9 * S, 0)] + [(10 * S + 5, 11 * S, False)],
)
def test_answers_within_the_second_of_the_change(
    memory: AttributeMemory, mtime_ns: int, answered_ns: int, racy: bool
) -> None:
    """They are not kept: the object may change again and look the same. Nor without the server's time."""
    told = info(mtime_ns=mtime_ns, answered_ns=answered_ns)
    assert is_racy(told) is racy
    memory.asking()(told)
    assert (memory.known("f", E1, mtime_ns) is None) is racy


@promise("S-12")
def test_a_new_mount_does_not_look_on_disk_until_memory_is_full(db: StateDb, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first walk asks for every name, and nothing is known."""
    looked: list[str] = []
    look = db.attributes

    def watched(key: str) -> KnownAttributes | None:
        looked.append(key)
        return look(key)

    monkeypatch.setattr(db, "attributes", watched)
    memory = AttributeMemory(db, the_loop(), entries=10)
    for number in range(10):
        assert memory.known(f"f{number}", E1, 10 * S) is None
        memory.asking()(info(f"f{number}"))
    resolve(memory.save())
    assert memory.known("f0", E1, 10 * S) is not None
    assert looked == []
    memory.asking()(info("f10"))
    assert memory.known("f0", E1, 10 * S) is not None, "it left the memory for f10"
    assert looked == ["f0"]
    assert memory.known("f1", E1, 10 * S) is not None, "it left the memory for f0"
    assert looked == ["f0", "f1"]


@promise("S-12")
def test_what_is_being_written_is_not_read_as_it_was(db: StateDb, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the loop deletes rows of changed objects from the database."""
    first = AttributeMemory(db, the_loop())
    first.asking()(info("f0"))
    resolve(first.save())
    memory = AttributeMemory(db, the_loop())
    goes_on, write, written = threading.Event(), db.remember_attributes, list[str]()

    def slowly(rows: Any, gone: list[str]) -> None:
        assert goes_on.wait(60.0)
        written.extend(gone)
        write(rows, gone)

    async def change() -> object:
        for number in range(300):
            memory.forget(f"f{number}")
        return memory.known("f0", E1, 10 * S)

    monkeypatch.setattr(db, "remember_attributes", slowly)
    assert resolve(change()) is None
    goes_on.set()
    eventually(lambda: db.attributes("f0") is None, "the row is deleted")
    resolve(memory.save())
    assert sorted(written) == sorted(f"f{number}" for number in range(300)), "none is written twice"


@promise("S-12", "S-163")
def test_the_last_rows_are_written_last(db: StateDb, memory: AttributeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that ends while a thread writes a batch waits for that: else older attributes would replace newer."""
    goes_on, write, writes = threading.Event(), db.remember_attributes, count()

    def slowly(*rows: Any) -> None:
        assert next(writes) or goes_on.wait(60.0), "the first batch is held up"
        write(*rows)

    async def change_and_save() -> None:
        for number in range(300):
            memory.asking()(info(f"f{number}"))
        memory.forget("f0")
        loop.later(0.05, goes_on.set)
        await memory.save()

    loop = the_loop()
    monkeypatch.setattr(db, "remember_attributes", slowly)
    resolve(change_and_save())
    assert db.attributes("f0") is None
    assert db.attributes("f299") is not None


@promise("S-12")
def test_names_that_come_and_go_are_not_many(
    db: StateDb, memory: AttributeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is written when it is full, whether its rows are new or gone."""
    loop, write, batches = the_loop(), db.remember_attributes, list[int]()

    def watched(rows: Any, gone: list[str]) -> None:
        batches.append(len(gone))
        write(rows, gone)

    monkeypatch.setattr(db, "remember_attributes", watched)
    for number in range(2000):
        loop.call(partial(memory.asking(), info(f"f{number}")))
        loop.call(partial(memory.forget, f"f{number - 5}"))
    eventually(lambda: batches, "a full batch is written")
    resolve(memory.save())
    assert sum(db.attributes(f"f{number}") is not None for number in range(2000)) == 5


@promise("S-12")
def test_a_full_disk_keeps_no_answer_back(
    db: StateDb, memory: AttributeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be remembered is asked for again."""

    def full(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(db, "remember_attributes", full)
    for number in range(600):
        the_loop().call(partial(memory.asking(), info(f"f{number}")))
    the_loop().call(partial(memory.forget, "f599"))
    resolve(memory.save())
    assert memory.known("f598", E1, 10 * S) is not None


@promise("S-163")
def test_what_was_asked_before_a_change_of_ours_is_not_kept(memory: AttributeMemory) -> None:
    """The server keeps ETag and time of an object whose attributes change: only the order tells old from new."""
    memory.asking()(info(mode="old"))
    late = memory.asking()
    memory.forget("f")
    assert memory.known("f", E1, 10 * S) is None
    late(info(mode="old"))
    assert memory.known("f", E1, 10 * S) is None
    late(info("g", mode="of another"))
    assert memory.known("g", E1, 10 * S) is not None
    memory.asking()(info(mode="new"))
    assert memory.known("f", E1, 10 * S) == ({"mode": "new"}, "a/b")


@promise("S-163")
def test_many_changes_do_not_bring_back_what_was_asked_before_the_first(memory: AttributeMemory) -> None:
    """Of so many objects it is not remembered which: then nothing that is as old is kept."""
    late = memory.asking()
    for number in range(5000):
        the_loop().call(partial(memory.forget, f"f{number}"))
    late(info("f0", mode="old"))
    assert memory.known("f0", E1, 10 * S) is None
