"""Loop: what is ready is called, and nothing that was given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from datastore.fuse.loop import Loop
from tests.clock import ManualClock
from tests.patience import PATIENCE_S


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    pairs = [os.pipe() for _ in range(2)]
    yield pairs
    for fd in (fd for pair in pairs for fd in pair):
        os.close(fd)


def test_what_can_be_read_is_called_until_it_is_given_up(pipes: list[tuple[int, int]]) -> None:
    loop, called = Loop(), list[int]()
    for at, (reading, _) in enumerate(pipes):
        loop.watch(reading, lambda at=at: called.append(at))  # type: ignore[misc]
    os.write(pipes[1][1], b"x")
    loop.turn()
    os.write(pipes[0][1], b"x")
    loop.unwatch(pipes[1][0])
    loop.turn()
    assert called == [1, 0]
    loop.close()


def test_what_ends_another_one_in_the_same_turn_is_the_last_to_be_called(pipes: list[tuple[int, int]]) -> None:
    loop, called = Loop(), list[int]()

    def only(at: int) -> None:
        called.append(at)
        loop.unwatch(pipes[1 - at][0])

    for at, (reading, writing) in enumerate(pipes):
        loop.watch(reading, lambda at=at: only(at))  # type: ignore[misc]
        os.write(writing, b"x")
    loop.turn()
    assert len(called) == 1
    loop.close()


def test_other_threads_have_it_call_something_and_wake_it() -> None:
    loop, called = Loop(), list[int]()
    threads = [threading.Thread(target=loop.soon, args=(lambda n=n: called.append(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    while len(called) < len(threads):
        loop.turn()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(called) == list(range(8))
    loop.wake()
    loop.turn()
    loop.close()


def test_it_calls_now_and_then() -> None:
    clock = ManualClock()
    loop, called = Loop(clock.monotonic), list[str]()

    def tick() -> None:
        called.append("tick")

    loop.every(10.0, tick)
    for seconds in (9.0, 2.0, 9.0, 2.0):
        clock.advance(seconds)
        loop.wake()
        loop.turn()
    assert called == ["tick", "tick"]
    loop.never(tick)
    clock.advance(100.0)
    loop.wake()
    loop.turn()
    assert called == ["tick", "tick"]
    loop.close()


def test_the_end_is_told_to_who_waits_for_it_and_nothing_comes_after_it() -> None:
    loop, called = Loop(), list[str]()
    loop.at_end(lambda: called.append("the end"))
    loop.soon(lambda: called.append("before"))
    loop.close()
    assert called == ["before", "the end"]
    assert not loop.soon(lambda: called.append("after"))
    assert called == ["before", "the end"]
