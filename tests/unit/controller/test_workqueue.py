"""datastore.controller.workqueue and cache."""

from __future__ import annotations

import asyncio
from typing import Any

from datastore.controller.cache import Shelf
from datastore.controller.workqueue import WorkQueue


def test_a_key_waits_once_and_is_worked_on_once_at_a_time() -> None:
    async def story() -> None:
        queue = WorkQueue[str]()
        queue.add("a")
        queue.add("a")
        queue.add("b")
        assert await queue.get() == "a"
        queue.add("a")
        assert await queue.get() == "b"
        assert len(queue) == 0
        queue.done("a")
        assert await queue.get() == "a"

    asyncio.run(story())


def test_an_appointment_is_kept_and_the_earlier_one_wins() -> None:
    async def story() -> None:
        queue = WorkQueue[str]()
        queue.add_after("late", 60.0)
        queue.add_after("soon", 0.02)
        queue.add_after("late", 0.01)
        assert [await queue.get(), await queue.get()] == ["late", "soon"]
        queue.done("late")
        queue.add_after("late", 0.0)
        assert await queue.get() == "late"

    asyncio.run(asyncio.wait_for(story(), 5))


def test_what_is_forgotten_does_not_come() -> None:
    async def story() -> None:
        queue = WorkQueue[str]()
        queue.add_after("a", 0.0)
        queue.forget("a")
        queue.add("b")
        assert await queue.get() == "b"
        assert len(queue) == 0

    asyncio.run(story())


def body(version: int, uid: str = "u", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a", "namespace": "n", "uid": uid, "resourceVersion": str(version), **more}}


def test_an_older_version_never_replaces_a_newer_one() -> None:
    shelf = Shelf()
    shelf.put(body(5, managedFields=["half of an object"]))
    shelf.put(body(4, labels={"old": "1"}))
    assert shelf.get(("n", "a")) == body(5)
    shelf.put(body(6, uid="another"))
    shelf.drop(("n", "a"), "u")
    assert len(shelf) == 1
    shelf.drop(("n", "a"), "another")
    assert shelf.values() == []


def test_an_answer_that_comes_after_the_end_does_not_bring_it_back() -> None:
    shelf = Shelf()
    shelf.put(body(5))
    shelf.drop(("n", "a"), "u")
    shelf.put(body(6, deletionTimestamp="2026-01-31T12:00:00Z"))
    assert shelf.get(("n", "a")) is None
    shelf.put(body(7, uid="next"))
    assert shelf.get(("n", "a")) == body(7, uid="next")
