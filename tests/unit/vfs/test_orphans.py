"""What an earlier process left, sent beside what is written now (docs/SEMANTICS.md, S-20, S-32)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest

from tests.driving import resolve
from tests.faulty import no_faults
from tests.mounted import Client, World, around, failing, no_writes
from tests.patience import PATIENCE_S
from tests.promises import promise

A_MOMENT_S = 0.3
"""What one who should wait is given to show that he does not."""


@pytest.fixture
def left(world: World) -> Client:
    """A mount with unsent bytes of 'f' that belong to no node: they could not be sent when it began, and can be now."""
    first = world.client()
    first.local.open("f", os.O_WRONLY | os.O_CREAT).write(b"older")
    again = first.again(plan=no_writes)
    again.faulty.plan = no_faults
    assert [row["path"] for row in again.fs.uploads.unsent()] == ["f"]
    return again


class Beside:
    """A call in a thread of its own; join() raises what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def begin(self) -> None:
        """Start, and give it time to go as far as it may."""
        self._thread.start()
        self._thread.join(A_MOMENT_S)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@promise("S-32")
@pytest.mark.parametrize("how", ["written", "renamed"])
def test_newer_content_is_not_overwritten_by_what_was_left(
    world: World, left: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What is on its way when the file is written anew arrives before that, or not at all."""
    left.local.write("other", b"newer")

    def make() -> None:
        if how == "written":
            left.local.write("f", b"newer")
        else:
            left.local.rename("other", "f")

    newer = Beside(make)
    around(monkeypatch, left, "put", newer.begin, lambda: None)
    assert resolve(left.fs.flush_all()) == []
    newer.join()
    assert world.body("f") == b"newer"
    assert resolve(left.fs.flush_all()) == []
    assert world.body("f") == b"newer"
    assert left.fs.uploads.unsent() == []


@promise("S-20")
def test_what_was_left_is_sent_once(world: World, left: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the upkeep and by a flush at the same time."""
    second = Beside(lambda: failures.extend(resolve(left.fs.flush_all())))
    failures: list[str] = []
    around(monkeypatch, left, "put", second.begin, lambda: None)
    before = left.calls("put")
    assert resolve(left.fs.flush_all()) == []
    second.join()
    assert (failures, left.calls("put") - before) == ([], 1)
    assert world.body("f") == b"older"


@promise("S-32")
def test_what_was_left_is_not_sent_after_newer_content(
    world: World, left: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry that comes while the newer content is on its way."""
    retry = Beside(lambda: resolve(left.fs.flush_all()))
    around(monkeypatch, left, "put", retry.begin, lambda: None)
    left.local.write("f", b"newer")
    retry.join()
    assert world.body("f") == b"newer"
    assert left.fs.uploads.unsent() == []


@promise("S-20")
def test_discarding_what_is_being_sent_waits_for_that(left: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is not closed meanwhile."""
    discard = Beside(lambda: resolve(left.fs.uploads.forget("f")))
    around(monkeypatch, left, "put", discard.begin, lambda: None)
    assert resolve(left.fs.flush_all()) == []
    discard.join()
    assert left.fs.uploads.unsent() == []


@promise("S-128")
def test_a_directory_does_not_go_where_unsent_files_belong(world: World) -> None:
    """What is in it would be replaced by them, though it is newer."""
    first = world.client()
    first.local.mkdir("d")
    first.local.open("d/f", os.O_WRONLY | os.O_CREAT).write(b"older")
    again = first.again(plan=no_writes)
    again.faulty.plan = no_faults
    again.local.rmdir("d")
    again.local.mkdir("t")
    again.local.write("t/f", b"newer")
    failing(errno.ENOTEMPTY, again.local.rename, "t", "d")
    assert resolve(again.fs.uploads.forget("d/f")) == 1
    again.local.rename("t", "d")
    assert resolve(again.fs.flush_all()) == []
    assert world.body("d/f") == b"newer"


@promise("S-128", "S-47")
def test_a_directory_goes_where_a_conflict_waits_for_a_person(world: World) -> None:
    """What lost against another client is never sent, so it is in nobody's way."""
    first = world.client(conflict="fail")
    first.local.mkdir("d")
    file = first.local.open("d/f", os.O_WRONLY | os.O_CREAT)
    file.write(b"loser")
    world.put("d/f", b"winner")
    failing(errno.ESTALE, file.close)
    again = first.again()
    assert [row["stuck"] for row in again.fs.uploads.unsent()] == [True]
    again.local.unlink("d/f")
    again.local.mkdir("t")
    again.local.write("t/f", b"newer")
    again.local.rename("t", "d")
    assert resolve(again.fs.flush_all()) != []
    assert world.body("d/f") == b"newer"


@promise("S-19")
def test_only_the_bytes_that_a_person_names_are_dropped(world: World) -> None:
    """Of three files that could not be sent, one is given up; the others are sent later."""
    one = world.client()
    one.faulty.plan = no_writes
    for name in ("a", "b", "c"):
        failing(errno.EIO, one.local.write, name, b"unsent")
    assert resolve(one.fs.uploads.forget("b")) == 1
    assert sorted(str(row["path"]) for row in one.fs.uploads.unsent()) == ["a", "c"]
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert world.all_keys() == ["a", "c"]
