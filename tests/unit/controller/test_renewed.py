"""datastore.controller.reconciler: a Secret that comes or changes is no matter of waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from datastore.api.names import FINALIZER
from datastore.controller.cache import Cache
from datastore.controller.classes import SecretRef
from datastore.controller.cluster import SECRETS, Cluster, Resource
from datastore.controller.reconciler import Reconciler
from datastore.controller.secretwatch import Uses
from datastore.controller.settings import Settings

KEY = ("team", "digits")
KEYS = SecretRef(namespace="team", name="keys")


class Api(Cluster):
    """An API server with one Datastore and perhaps its Secret. looks: how often the Secret was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.secret: dict[str, Any] | None = None
        self.looks = 0
        spec = {"s3": {"bucket": "digits", "endpoint": "http://h:1", "credentialsSecret": "keys"}}
        metadata = {"name": "digits", "namespace": "team", "uid": "0b6d", "resourceVersion": "1"}
        metadata |= {"finalizers": [FINALIZER]}  # type: ignore[dict-item]
        kind = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore"}
        self.datastore: dict[str, Any] = {**kind, "metadata": metadata, "spec": spec}

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        assert resource is SECRETS
        self.looks += 1
        return self.secret

    async def apply(self, body: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        assert subresource == "status"
        version = str(int(self.datastore["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.datastore["metadata"], "resourceVersion": version}
        self.datastore = {**self.datastore, "metadata": metadata, "status": body["status"]}
        return self.datastore

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)

    @property
    def reason(self) -> str:
        return str(self.datastore["status"]["conditions"][0]["reason"])


class World:
    def __init__(self) -> None:
        self.api, self.uses = Api(), Uses()
        cache = Cache()
        cache.datastores.put(self.api.datastore)
        self.reconciler = Reconciler(self.api, cache, Settings(first_retry_s=30.0), self.uses)

    async def reason(self) -> str:
        await self.reconciler.reconcile(KEY)
        return self.api.reason


def run(story: Any) -> None:
    async def told() -> None:
        world = World()
        try:
            await story(world)
        finally:
            await world.reconciler.close()

    asyncio.run(told())


def test_a_secret_that_comes_is_looked_at_before_the_next_try() -> None:
    """S-113"""

    async def story(world: World) -> None:
        assert await world.reason() == "SecretNotFound"
        world.api.secret = {"metadata": {"name": "keys", "namespace": "team"}, "data": {}}
        assert await world.reason() == "SecretNotFound", "its time has not come"
        assert world.reconciler.renewed(KEYS) == {KEY}
        assert await world.reason() == "SecretInvalid"

    run(story)


def test_a_secret_that_changes_while_it_is_tried_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-113"""

    async def story(world: World) -> None:
        get = world.api.get

        async def changing(resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
            found = await get(resource, namespace, name)
            if world.api.looks == 1:
                world.api.secret = {"metadata": {"name": "keys", "namespace": "team"}, "data": {}}
                world.reconciler.renewed(KEYS)
            return found

        monkeypatch.setattr(world.api, "get", changing)
        assert await world.reason() == "SecretInvalid"

    run(story)


def test_the_secret_of_a_datastore_that_is_gone_is_nobodys() -> None:
    async def story(world: World) -> None:
        await world.reason()
        assert world.uses.of(KEYS) == {KEY}
        cache = world.reconciler._cache
        cache.datastores.drop(KEY)
        await world.reconciler.reconcile(KEY)
        assert world.uses.of(KEYS) == frozenset()

    run(story)
