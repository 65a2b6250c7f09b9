"""datastore.controller.runtime.queue."""

from __future__ import annotations

import asyncio

from datastore.controller.runtime.queue import WorkQueue
from tests.patience import PATIENCE_S
from tests.promises import promise

A, B = ("team", "a"), ("team", "b")


def test_a_key_waits_once_and_is_worked_on_once_at_a_time() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.add(A)
        queue.add(A)
        queue.add(B)
        assert await queue.get() == A
        queue.add(A)
        assert await queue.get() == B
        assert len(queue) == 0
        queue.done(A)
        assert await queue.get() == A

    asyncio.run(story())


def test_a_key_is_reconciled_at_the_earlier_of_two_times() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.add_after(A, 60.0)
        queue.add_after(B, 0.02)
        queue.add_after(A, 0.01)
        assert [await queue.get(), await queue.get()] == [A, B]
        queue.done(A)
        queue.add_after(A, 0.0)
        assert await queue.get() == A

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


@promise("S-245")
def test_namespaces_take_turns_however_long_the_queue_of_one_is() -> None:

    async def story() -> None:
        queue = WorkQueue()
        for number in range(100):
            queue.add(("greedy", str(number)))
        queue.add(("modest", "a"))
        queue.add(("modest", "b"))
        queue.add(("third", "a"))
        first = [await queue.get() for _ in range(6)]
        assert [namespace for namespace, _ in first] == ["greedy", "modest", "third", "greedy", "modest", "greedy"]
        assert len(queue) == 97

    asyncio.run(story())
