"""Requests side by side for a larger piece of work (Core.each): one that is lost keeps nobody waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from datastore.errors import DeadlineExceeded
from datastore.fuse.vfs.tree import core
from datastore.fuse.vfs.upload import copies
from tests.mounted import IO_THREADS, Client, World
from tests.patience import eventually
from tests.promises import promise


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


def test_what_goes_on_is_waited_for(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends after all others, of which one ends in the time that is waited at a time: none of them is lost."""
    turns = [threading.Event() for _ in range(7)]
    order = iter((*range(1, 7), 0))
    ended = threading.Semaphore(0)

    def work(number: int) -> int:
        assert turns[number].wait(60)
        return number

    def long_wait(waited: tuple[Future[int]], timeout: float) -> object:
        number = next(order, None)
        if number is not None:
            turns[number].set()
            assert ended.acquire(timeout=60)
        return wait(waited, timeout=0)

    submit = one.fs.core.io.submit

    def noted(*arguments: object) -> Future[int]:
        future: Future[int] = submit(*arguments)  # type: ignore[arg-type]
        future.add_done_callback(lambda _: ended.release())
        return future

    monkeypatch.setattr(one.fs.core.io, "submit", noted)
    monkeypatch.setattr(core, "wait", long_wait)
    assert one.fs.core.each(work, range(7)) == list(range(7))


@promise("S-26")
def test_large_objects_below_a_renamed_directory(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parts are copied side by side too, and each is a request of its own: none is taken for lost."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    monkeypatch.setattr(copies, "COPY_MAX", 5 << 20)
    content = bytes(11 << 20)
    world.put("d/large", content)
    world.put("d/small", b"small")
    threads: set[str] = set()
    copy_part = one.faulty.upload_part_copy

    def noted(*arguments: object, **options: object) -> object:
        threads.add(threading.current_thread().name)
        both.wait(60)
        return copy_part(*arguments, **options)  # type: ignore[arg-type]

    both = threading.Barrier(3)
    monkeypatch.setattr(one.faulty, "upload_part_copy", noted)
    one.local.rename("d", "e")
    assert world.body("e/large") == content
    assert world.body("e/small") == b"small"
    assert len(threads) == 3
