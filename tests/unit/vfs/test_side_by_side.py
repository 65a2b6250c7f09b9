"""Requests side by side for a larger piece of work (Core.each): one that is lost keeps nobody waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from datastore.errors import DeadlineExceeded
from datastore.fuse.vfs.tree import core
from tests.mounted import IO_THREADS, Client
from tests.patience import eventually


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Ends what the test left at work."""
    event = threading.Event()
    yield event
    event.set()


def test_a_lost_task_fails(one: Client, over: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that has not begun by then never begins."""
    begun: list[int] = []

    def lost(number: int) -> None:
        begun.append(number)
        assert over.wait(60)

    def long_wait(waited: tuple[Future[None]], timeout: float) -> object:
        eventually(lambda: len(begun) == IO_THREADS, "as many begin as there are threads")
        return wait(waited, timeout=0)

    monkeypatch.setattr(core, "wait", long_wait)
    with pytest.raises(DeadlineExceeded):
        one.fs.core.each(lost, range(IO_THREADS + 1))
    over.set()
    one.fs.core.io.shutdown(wait=True)
    assert sorted(begun) == list(range(IO_THREADS))
