"""Loop: what is ready is called, and nothing that was given up; tasks, what they wait for, and lanes."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from datastore.errors import MountFailed
from datastore.fuse import loop as module
from datastore.fuse.loop import Future, Lock, Loop, Semaphore, Task, Wait, all_of, each, now, pause, running
from datastore.retry import Call, current_call, one_call
from tests.clock import ManualClock
from tests.patience import PATIENCE_S


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    pairs = [os.pipe() for _ in range(2)]
    yield pairs
    for fd in (fd for pair in pairs for fd in pair):
        os.close(fd)


def watched(loop: Loop, end: socket.socket) -> Wait:
    """The wait for a change of a socket's state."""
    wait = Wait(loop)
    loop.watch(end.fileno(), wait.end, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    return wait


def test_what_can_be_read_is_called_until_it_is_given_up(loop: Loop, pipes: list[tuple[int, int]]) -> None:
    called: list[int] = []
    for at, (reading, _) in enumerate(pipes):
        loop.watch(reading, lambda at=at: called.append(at))  # type: ignore[misc]
    os.write(pipes[1][1], b"x")
    loop.turn()
    os.write(pipes[0][1], b"x")
    loop.unwatch(pipes[1][0])
    loop.turn()
    assert called == [1, 0]


def test_what_ends_another_one_in_a_turn_is_the_last_to_be_called(loop: Loop, pipes: list[tuple[int, int]]) -> None:
    called: list[int] = []

    def only(at: int) -> None:
        called.append(at)
        loop.unwatch(pipes[1 - at][0])

    for at, (reading, writing) in enumerate(pipes):
        loop.watch(reading, lambda at=at: only(at))  # type: ignore[misc]
        os.write(writing, b"x")
    loop.turn()
    assert len(called) == 1


def test_other_threads_have_it_call_something_and_wake_it(loop: Loop) -> None:
    called: list[int] = []
    threads = [threading.Thread(target=loop.soon, args=(lambda n=n: called.append(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    while len(called) < len(threads):
        loop.turn()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(called) == list(range(8))
    loop.soon(lambda: None)
    loop.turn()


def test_a_ctrl_c_in_a_turn_leaves_the_rest_to_the_next_one(loop: Loop) -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    called: list[str] = []
    for call in (ctrl_c, lambda: called.append("left")):
        loop.soon(call)
    with pytest.raises(KeyboardInterrupt):
        loop.turn()
    loop.soon(lambda: called.append("later"))
    loop.turn()
    assert called == ["left", "later"]


def test_it_calls_now_and_then() -> None:
    clock = ManualClock()
    loop, called = Loop(clock.monotonic), list[str]()

    def tick() -> None:
        called.append("tick")

    loop.every(10.0, tick)
    for seconds in (9.0, 2.0, 9.0, 2.0):
        clock.advance(seconds)
        loop.soon(lambda: None)
        loop.turn()
    assert called == ["tick", "tick"]
    loop.never(tick)
    clock.advance(100.0)
    loop.soon(lambda: None)
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


# -- tasks


def turn_until_done(loop: Loop, *tasks: Future[Any]) -> None:
    while not all(task.done for task in tasks):
        loop.turn()


def test_a_task_that_waits_for_nothing_ends_in_its_first_step(loop: Loop) -> None:
    """Which comes when who made it begins it."""

    async def answer() -> int:
        return 7

    task = Task(loop, answer(), None)
    told: list[int] = []
    task.on_done(lambda: told.append(task.result()))
    loop.soon(lambda: None)
    loop.turn()
    assert not told
    task.step()
    task.on_done(lambda: told.append(task.result()))
    assert told == [7, 7]


def test_results_and_errors_come_to_all_who_await_them(loop: Loop) -> None:
    right, wrong = Future[int](), Future[int]()

    async def adds() -> int:
        return await right + await right

    async def survives() -> str:
        try:
            await wrong
        except ValueError as error:
            return str(error)
        return ""

    tasks: list[Task[Any]] = [loop.spawn(adds()), loop.spawn(survives()), loop.spawn(survives())]
    loop.turn()
    assert not any(task.done for task in tasks)
    right.set_result(2)
    wrong.set_error(ValueError("no"))
    loop.turn()
    assert [task.result() for task in tasks] == [4, "no", "no"]


def test_what_lies_between_two_awaits_is_never_interrupted(loop: Loop) -> None:
    """Tasks take turns, in order, at each pause."""
    seen: list[str] = []

    async def speaks(name: str) -> None:
        for number in range(3):
            seen.append(f"{name}{number}")
            seen.append(f"{name}{number}")
            await loop.pause()

    turn_until_done(loop, *[loop.spawn(speaks(name)) for name in "ab"])
    assert seen == [said for number in range(3) for name in "ab" for said in [f"{name}{number}"] * 2]


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = ManualClock()
    loop, awake = Loop(clock.monotonic), list[float]()

    async def sleeps(seconds: float) -> None:
        await loop.sleep(seconds)
        awake.append(seconds)

    for seconds in (3.0, 1.0, 2.0):
        loop.spawn(sleeps(seconds))
    loop.turn()
    for expected in ([], [1.0], [1.0, 2.0, 3.0]):
        assert awake == expected
        clock.advance(1.5)
        for _ in range(2):
            loop.soon(lambda: None)
            loop.turn()
    loop.close()


def test_all_have_ended_before_the_first_error_is_raised(loop: Loop) -> None:
    ended: list[int] = []

    async def works(number: int) -> int:
        for _ in range(number):
            await loop.pause()
        ended.append(number)
        if number in (1, 2):
            raise SystemExit(f"{number} failed")
        return number

    async def all_work(*numbers: int) -> list[int]:
        return await all_of([loop.spawn(works(number)) for number in numbers])

    assert loop.run(all_work(4, 0, 3)) == [4, 0, 3]
    ended.clear()
    with pytest.raises(SystemExit, match="2 failed"):
        loop.run(all_work(4, 2, 1))
    assert ended == [1, 2, 4]


def test_what_nobody_awaits_is_heard_when_it_fails(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("no")

    turn_until_done(loop, loop.background(fails()))
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["no"]


# -- with and without a loop


def test_each_thread_knows_which_loop_it_turns(loop: Loop) -> None:
    async def asks() -> list[Loop | None]:
        return [running(), await loop.lane(running), await loop.aside(running, "aside"), running()]

    assert running() is None
    assert loop.run(asks()) == [loop, None, None, loop]
    with loop.turning():
        assert running() is loop
        loop.soon(lambda: None)
        loop.turn()
    assert running() is None


def test_without_a_loop_a_coroutine_blocks_or_is_refused(loop: Loop) -> None:
    """One that waits for a loop is ended, so that it tidies up."""
    seen: list[str] = []

    async def waits(seconds: float, future: Future[str] | None = None) -> str:
        try:
            await pause(seconds)
            return await future if future else "done"
        finally:
            seen.append("tidied")

    began = time.monotonic()
    assert now(waits(0.05)) == "done"
    assert time.monotonic() - began >= 0.05
    failed = Future[str]()
    failed.set_error(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        now(waits(0.0, failed))
    with pytest.raises(RuntimeError, match="waits for a loop"):
        now(waits(0.0, Future()))
    assert seen == ["tidied"] * 3


@pytest.mark.parametrize("on_loop", [True, False])
def test_each_of_several_is_called_so_many_side_by_side(loop: Loop, *, on_loop: bool) -> None:
    """All of them, though one fails; without a loop one after the other, up to that one."""
    inside, most, ended = 0, 0, list[int]()

    async def works(number: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await pause(0.001)
        inside -= 1
        if number < 0:
            raise ValueError(f"{number}")
        ended.append(number)
        return 2 * number

    wait = loop.run if on_loop else now
    assert wait(each(works, range(10), 3)) == list(range(0, 20, 2))
    assert most == (3 if on_loop else 1)
    ended.clear()
    with pytest.raises(ValueError, match="-1"):
        wait(each(works, [1, -1, -2, *range(2, 9)], 3))
    assert ended[0] == 1
    assert len(ended) <= 2, "after an error no other is begun"


def test_what_nobody_has_a_lane_for_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LANES", 1)
    loop, go_on = Loop(), threading.Event()

    async def asks() -> tuple[str, bool]:
        busy = loop.lane(go_on.wait, PATIENCE_S)
        with pytest.raises(ValueError, match="invalid literal"):
            await loop.aside(partial(int, "x"), "aside")
        name = await loop.aside(lambda: threading.current_thread().name, "of-its-own")
        assert not busy.done
        go_on.set()
        return name, await busy

    assert loop.run(asks()) == ("of-its-own", True)
    loop.close()


# -- descriptors that never wait


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets; the first never waits."""
    one, other = socket.socketpair()
    one.setblocking(False)
    with one, other:
        yield one, other


def test_an_edge_tells_that_something_came_or_can_be_sent(
    loop: Loop, ends: tuple[socket.socket, socket.socket]
) -> None:
    """To each side what it waits for, as often as it changes."""
    one, other = ends
    edge = watched(loop, one)

    async def receives() -> list[bytes]:
        got: list[bytes] = []
        while not got or got[-1]:
            try:
                got.append(one.recv(100))
            except BlockingIOError:
                await edge.begin(PATIENCE_S)
        return got

    async def sends(left: int) -> None:
        while left:
            try:
                left -= one.send(bytes(left))
            except BlockingIOError:
                await edge.begin(PATIENCE_S)

    def takes(left: int) -> None:
        while left:
            left -= len(other.recv(left))

    async def both() -> list[bytes]:
        taking = loop.lane(takes, 5 << 20)
        await sends(5 << 20)
        await taking
        receiving = loop.spawn(receives())
        for piece in (b"a", b"b"):
            await loop.sleep(0.01)
            other.send(piece)
        await loop.sleep(0.01)
        other.shutdown(socket.SHUT_WR)
        return await receiving

    assert loop.run(both()) == [b"a", b"b", b""]


def test_who_waits_too_long_at_an_edge_is_told_so_with_the_next_look(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """And who is told of a change is not. Nothing is looked at while nobody waits."""
    clock = ManualClock()
    loop, (one, other) = Loop(clock.monotonic), ends
    edges = [watched(loop, one), watched(loop, other)]
    waiting: list[Future[None]] = []

    def passes(seconds: float) -> list[bool]:
        clock.advance(seconds)
        for _ in range(3):
            loop.soon(lambda: None)
            loop.turn()
        return [task.done for task in waiting]

    timers = len(loop._timers)
    passes(0.0)  # that they can be written to is told once
    waiting += [edge.begin(seconds) for edge, seconds in zip(edges, (1.0, 9.0), strict=True)]
    assert passes(0.9) == [False, False]
    assert passes(0.1 + module._TICK_S) == [True, False]
    assert isinstance(waiting[0].error, TimeoutError)
    one.send(b"x")
    assert passes(0.0) == [True, True]
    assert waiting[1].error is None
    passes(1.0)
    assert len(loop._timers) == timers
    loop.close()


# -- locks


def test_a_lock_is_given_in_the_order_of_asking_and_taken_again_by_who_has_it(loop: Loop) -> None:
    lock, seen = Lock(), list[str]()

    async def holds(name: str) -> None:
        async with lock:
            async with lock:
                seen.append(f"{name} in")
                await loop.pause()
            assert lock.try_acquire()
            lock.release()
            await loop.pause()
            seen.append(f"{name} out")

    async def tries() -> bool:
        return lock.try_acquire()

    tasks = [loop.spawn(holds(name)) for name in "abc"]
    loop.turn()
    assert lock.locked
    assert not loop.run(tries())
    turn_until_done(loop, *tasks)
    assert seen == [f"{name} {what}" for name in "abc" for what in ("in", "out")]
    assert not lock.locked


def test_a_lock_of_a_task_is_not_its_childs_nor_nobodys(loop: Loop) -> None:
    lock = Lock()

    async def tries() -> bool:
        return lock.try_acquire()

    async def parent() -> bool:
        async with lock:
            return await loop.spawn(tries())

    assert not loop.run(parent())
    assert lock.try_acquire()
    assert not lock.try_acquire(), "outside of tasks nobody is known to have it"
    lock.release()


def test_a_failure_lets_go_of_a_lock(loop: Loop) -> None:
    lock = Lock()

    async def fails() -> None:
        async with lock:
            await loop.pause()
            raise ValueError

    async def follows() -> bool:
        async with lock:
            return True

    failing, following = loop.spawn(fails()), loop.spawn(follows())
    turn_until_done(loop, failing, following)
    assert isinstance(failing.error, ValueError)
    assert following.result()


def test_a_semaphore_has_so_many_places(loop: Loop) -> None:
    places, inside, most = Semaphore(3), 0, 0
    order: list[int] = []

    async def enters(number: int) -> None:
        nonlocal inside, most
        async with places:
            order.append(number)
            inside += 1
            most = max(most, inside)
            for _ in range(number % 4):
                await loop.pause()
            inside -= 1

    turn_until_done(loop, *[loop.spawn(enters(number)) for number in range(20)])
    assert (most, order) == (3, list(range(20)))


# -- lanes


def test_what_blocks_runs_beside_the_loop(loop: Loop) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def blocks(number: int) -> int:
        begun.release()
        assert go_on.wait(PATIENCE_S)
        if number == 2:
            raise ValueError("two")
        return number

    async def asks() -> list[object]:
        futures = [loop.lane(blocks, number) for number in range(4)]
        for _ in range(4):
            await loop.lane(begun.acquire)
        go_on.set()
        with pytest.raises(ValueError, match="two"):
            await futures[2]
        return [await futures[number] for number in (0, 1, 3)]

    assert loop.run(asks()) == [0, 1, 3]


def test_what_a_call_posts_comes_before_its_result(loop: Loop) -> None:
    came: list[int] = []

    def tells() -> None:
        for number in range(100):
            loop.soon(partial(came.append, number))

    async def asks() -> list[int]:
        await loop.lane(tells)
        return list(came)

    assert loop.run(asks()) == list(range(100))


def test_there_are_so_many_lanes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LANES", 3)
    loop = Loop()
    at_once: list[int] = []
    inside = threading.Semaphore(0)

    def counts() -> None:
        inside.release()
        at_once.append(inside._value)
        time.sleep(0.01)
        inside.acquire()

    async def asks() -> None:
        await all_of([loop.lane(counts) for _ in range(12)])

    loop.run(asks())
    assert len(at_once) == 12
    assert max(at_once) <= 3
    loop.close()


def test_the_disk_does_not_wait_for_a_storage_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LANES", 2)
    loop, answers = Loop(), threading.Event()

    async def asks() -> str:
        asked = [loop.lane(answers.wait, PATIENCE_S) for _ in range(4)]
        kept = await loop.on_disk(lambda: "kept")
        assert not any(each.done for each in asked)
        answers.set()
        await all_of(asked)
        return kept

    assert loop.run(asks()) == "kept"
    loop.close()


def test_tasks_and_lanes_work_for_the_call_of_who_began_them(loop: Loop) -> None:
    mine = Call(0.0)

    async def child() -> Call | None:
        await loop.pause()
        return current_call()

    async def parent() -> list[Call | None]:
        spawned, alone = loop.spawn(child()), loop.background(child())
        return [current_call(), await loop.lane(current_call), await spawned, await alone, current_call()]

    with one_call(mine):
        other = loop.spawn(child())
        found = loop.run(parent())
        assert current_call() is mine
    assert found == [mine, mine, mine, None, mine]
    assert other.result() is mine
    assert loop.run(parent()) == [None] * 5


# -- other threads


def test_many_threads_run_coroutines_and_one_of_them_turns(loop: Loop) -> None:
    counted = 0
    turned_by: set[int] = set()

    async def counts() -> int:
        nonlocal counted
        before = counted
        await loop.pause()
        turned_by.add(threading.get_ident())
        counted += 1
        assert counted > before
        return await loop.lane(lambda: 1)

    def many() -> int:
        return sum(loop.run(counts()) + loop.call(lambda: 1) for _ in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert [each.result() for each in [threads.submit(many) for _ in range(8)]] == [100] * 8
    assert counted == 400
    assert threading.get_ident() not in turned_by


def test_who_turns_it_for_good_need_not_wait_for_a_long_run(loop: Loop) -> None:
    over, begun = Future[None](), threading.Event()

    async def long() -> int:
        begun.set()
        await over
        return threading.get_ident()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(lambda: loop.run(long()))
        assert begun.wait(PATIENCE_S)
        with loop.turning():
            loop.soon(partial(over.set_result, None))
            while not running.done():
                loop.soon(lambda: None)
                loop.turn()
            assert running.result() == threading.get_ident()


def test_another_thread_goes_on_when_nobody_turns_it_any_more(loop: Loop) -> None:
    waits = Future[int]()

    async def waiting() -> int:
        return await waits

    with ThreadPoolExecutor(1) as threads, loop.turning():
        running = threads.submit(lambda: loop.run(waiting()))
        loop.turn()
        waits.set_result(3)
        with pytest.raises(RuntimeError, match="wait for itself"):
            loop.call(lambda: 1)
    assert running.result() == 3


def test_who_waits_is_told_of_the_end() -> None:
    loop, begun = Loop(), threading.Event()

    async def for_ever() -> None:
        begun.set()
        await Future[None]()

    def ends(coroutine: Coroutine[Any, Any, None]) -> None:
        with pytest.raises(MountFailed, match="has ended"):
            loop.run(coroutine)

    with ThreadPoolExecutor(1) as threads:
        with loop.turning():
            running = threads.submit(ends, for_ever())
            while not begun.is_set():
                loop.turn()
            loop.close()
        running.result()
        ends(for_ever())
