"""datastore.controller.servings.kind: what the cluster refuses is told and tried again."""

from __future__ import annotations

import asyncio

import pytest

from datastore.api.resources import DATASTORES, MODELS, SERVINGS
from datastore.controller.runtime.client import ApiError
from datastore.controller.servings.kind import ServingKind
from datastore.controller.servings.settings import Settings
from tests.promises import promise
from tests.unit.controller.playedclient import PlayedClient
from tests.unit.controller.servings.test_decide import MODEL, STORE, serving

QUOTA = ApiError(403, "Forbidden", 'services "digits" is forbidden: exceeded quota: small, used: 2, limited: 2')


@promise("S-410")
def test_a_refused_object_is_reported_and_made_once_the_cluster_accepts_it() -> None:
    api = PlayedClient(serving(), QUOTA)
    kind = ServingKind(Settings(verify_image="image"), api, lambda: None)
    tell = {watch.resource: watch.tell for watch in kind.watches()}
    for resource, body in ((DATASTORES, STORE), (MODELS, MODEL), (SERVINGS, serving())):
        metadata = {"namespace": "team", "uid": resource.plural, **body["metadata"]}
        tell[resource]({"type": None, "object": {**body, "metadata": metadata}})
    ((_, reconcile),) = kind.queues()

    async def twice() -> None:
        with pytest.raises(ApiError):  # so that the operator tries it again
            await reconcile(("team", "digits"))
        ready = api.conditions["Ready"]
        assert (ready["status"], ready["reason"]) == ("False", "Refused")
        assert "exceeded quota: small" in ready["message"]
        api.refusal = None
        await reconcile(("team", "digits"))
        assert api.made == [("Deployment", "digits"), ("Service", "digits")]

    asyncio.run(twice())
