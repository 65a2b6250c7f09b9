"""datastore.controller.servings.kind: what the cluster refuses is told and tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from datastore.api.resources import DATASTORES, MODELS, SERVINGS, Resource
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.servings.kind import ServingKind
from datastore.controller.servings.settings import Settings
from tests.promises import promise
from tests.unit.controller.servings.test_decide import MODEL, STORE, serving

QUOTA = ApiError(403, "Forbidden", 'services "digits" is forbidden: exceeded quota: small, used: 2, limited: 2')


class Full(Client):
    """A namespace whose quota takes no new objects while `full`."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True
        self.status: Mapping[str, Any] = {}
        self.made: list[str] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return None

    async def apply(self, body: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        if subresource == "status":
            self.status = body["status"]
            return serving(**body["status"])
        if self.full:
            raise QUOTA
        self.made.append(body["kind"])
        return {**body, "metadata": {**body["metadata"], "uid": "made"}}

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)


@promise("S-410")
def test_a_refused_object_is_reported_and_made_once_the_cluster_accepts_it() -> None:
    api = Full()
    kind = ServingKind(Settings(verify_image="image"), api, lambda: None)
    tell = {watch.resource: watch.tell for watch in kind.watches()}
    for resource, body in ((DATASTORES, STORE), (MODELS, MODEL), (SERVINGS, serving())):
        metadata = {"namespace": "team", "uid": resource.plural, **body["metadata"]}
        tell[resource]({"type": None, "object": {**body, "metadata": metadata}})
    ((_, reconcile),) = kind.queues()

    async def twice() -> None:
        with pytest.raises(ApiError):  # so that the operator tries it again
            await reconcile(("team", "digits"))
        ready = next(each for each in api.status["conditions"] if each["type"] == "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "Refused")
        assert "exceeded quota: small" in ready["message"]
        api.full = False
        await reconcile(("team", "digits"))
        assert api.made == ["Deployment", "Service"]

    asyncio.run(twice())
