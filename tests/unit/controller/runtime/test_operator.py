"""datastore.controller.runtime.operator: how its workers go on after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import kopf
import pytest

from datastore.api.resources import DATASTORES, Resource
from datastore.controller.runtime import operator
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.election import Election
from datastore.controller.runtime.operator import KindMissing, Operator
from datastore.controller.runtime.queue import Key, WorkQueue
from datastore.controller.runtime.settings import RuntimeSettings
from datastore.controller.runtime.watches import Watch
from tests.patience import PATIENCE_S
from tests.promises import promise

KEY = ("team", "digits")


class Api(Client):
    """Serves every kind, and takes a Lease."""

    async def serves(self, resource: Resource) -> bool:
        return True

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return None

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)


class Waits(WorkQueue):
    """waits: after how many seconds keys were to come again."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def add_after(self, key: Key, delay_s: float) -> None:
        self.waits.append(delay_s)
        super().add_after(key, delay_s)


class Failing:
    """A Kind with one object. outcomes: what its reconciles come to, one after the other; then `done` is set."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.queue, self.done = Waits(), asyncio.Event()
        self._outcomes = list(outcomes)

    def watches(self) -> Any:
        return ()

    def queues(self) -> Any:
        return ((self.queue, self.reconcile),)

    def beside(self, leading: Any) -> Any:
        return ()

    def refresh(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reconcile(self, key: Key) -> float | None:
        if not self._outcomes:
            self.done.set()
            return None
        outcome = self._outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return 0.0


def test_a_failure_is_retried_after_the_first_wait_and_then_after_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reconcile that succeeds begins the waits anew."""

    async def watching(*, stop_flag: asyncio.Event, **_: Any) -> None:
        await stop_flag.wait()

    async def waits(*outcomes: Exception | None) -> list[float]:
        kind = Failing(*outcomes)
        kind.queue.add(KEY)
        settings = RuntimeSettings(first_retry_s=0.001, retry_ceiling_s=0.004, port=0)
        async with asyncio.timeout(PATIENCE_S):
            await Operator(settings, "l", lambda client, fence: kind).run(kind.done)
        return kind.queue.waits

    monkeypatch.setattr(kopf, "operator", watching)
    monkeypatch.setattr(operator, "Client", Api)
    monkeypatch.setattr(Election, "leading", lambda _: True)
    refused, defect = ApiError(422, "Invalid", "the field is wrong"), ValueError("a defect")
    assert asyncio.run(waits(refused, defect, refused, defect)) == [0.001, 0.002, 0.004, 0.004]
    assert asyncio.run(waits(defect, None, refused)) == [0.001, 0.0, 0.001]


class Watching(Failing):
    def watches(self) -> Any:
        return (Watch(resource=DATASTORES, tell=lambda _: None),)


@promise("S-247")
def test_a_kind_that_was_removed_just_before_kopf_looked_for_it_ends_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kopf looks once. A controller that went on would never see an object of the kind, and be ready and alive."""

    async def found_nothing(*, insights: Any, stop_flag: asyncio.Event, **_: Any) -> None:
        insights.ready_resources.set()
        await stop_flag.wait()

    monkeypatch.setattr(kopf, "operator", found_nothing)
    monkeypatch.setattr(operator, "Client", Api)
    running = Operator(RuntimeSettings(port=0), "l", lambda client, fence: Watching())
    with pytest.raises(KindMissing, match="no CustomResourceDefinition datastores"):
        asyncio.run(asyncio.wait_for(running.run(asyncio.Event()), PATIENCE_S))


@promise("S-247")
@pytest.mark.parametrize("removed", [True, False])
def test_the_end_of_the_watches_is_explained_by_a_kind_that_was_removed(
    monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Any other error stays as it is."""
    served = True

    async def serves(_: Client, resource: Resource) -> bool:
        return served or resource != DATASTORES

    async def ends(**_: Any) -> None:
        nonlocal served
        served = not removed
        raise ValueError("from kopf")

    monkeypatch.setattr(kopf, "operator", ends)
    monkeypatch.setattr(Api, "serves", serves)
    monkeypatch.setattr(operator, "Client", Api)
    running = Operator(RuntimeSettings(port=0), "l", lambda client, fence: Watching())
    expected = "no CustomResourceDefinition datastores.datastore.dev.*datastore crd" if removed else "from kopf"
    with pytest.raises(KindMissing if removed else ValueError, match=expected):
        asyncio.run(asyncio.wait_for(running.run(asyncio.Event()), PATIENCE_S))
