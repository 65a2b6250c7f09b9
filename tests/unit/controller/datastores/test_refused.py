"""datastore.controller.datastores: what the cluster does not accept, as a quota says, is told and tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from datastore.api.names import FINALIZER
from datastore.api.resources import EVENTS, Resource
from datastore.api.volumecontext import DRIVER
from datastore.controller.datastores.informers import Informers
from datastore.controller.datastores.plainclaims import PlainClaims
from datastore.controller.datastores.reconciler import Reconciler
from datastore.controller.datastores.secretwatch import Uses
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.recorder import Recorder
from tests.patience import PATIENCE_S
from tests.promises import promise

KEY = ("team", "data")
QUOTA = ApiError(403, "Forbidden", '"data" is forbidden: exceeded quota: small, requested: 1, used: 3, limited: 3')
ENDS = ApiError(403, "Forbidden", "unable to create new content in namespace team because it is being terminated")


class Api(Client):
    """A namespace that takes no new claims and no new Datastores while `refusal` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: ApiError | None = QUOTA
        self.status: Mapping[str, Any] = {}
        self.made: list[tuple[str, str]] = []
        self.events: list[Mapping[str, Any]] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return None

    async def apply(self, body: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        if subresource == "status":
            self.status = body["status"]
            return {**datastore(), "status": self.status}
        return self._made(body)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if resource is EVENTS:
            self.events.append(body)
            return dict(body)
        return self._made(body)

    def conditions(self) -> dict[str, Mapping[str, Any]]:
        """Those of the Datastore, by type."""
        return {each["type"]: each for each in self.status["conditions"]}

    def _made(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        self.made.append((body["kind"], body["metadata"]["name"]))
        return {**body, "metadata": {"uid": "made", "creationTimestamp": "2026-01-01T00:00:00Z", **body["metadata"]}}


def datastore() -> dict[str, Any]:
    metadata = {"name": "data", "namespace": "team", "uid": "0b6d", "generation": 1, "finalizers": [FINALIZER]}
    spec = {"claim": {"storageClassName": "disk"}}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": metadata, "spec": spec}


def plain_claim() -> dict[str, Any]:
    spec = {"storageClassName": "s3", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"metadata": {"name": "data", "namespace": "team", "uid": "c-1"}, "spec": spec, "status": {}}


def storage_class() -> dict[str, Any]:
    parameters = {"bucket": "all", "secretName": "keys", "secretNamespace": "team"}
    return {"metadata": {"name": "s3", "uid": "k-1"}, "provisioner": DRIVER, "parameters": parameters}


def _leads() -> None:
    """This replica may write."""


def informers() -> Informers:
    return Informers(lambda _: None, lambda _: None, lambda _: True)


@promise("S-71")
def test_a_refused_claim_is_reported_and_made_once_the_cluster_accepts_it() -> None:
    api, known = Api(), informers()
    known.datastores.put(datastore())

    async def story() -> None:
        woken = asyncio.Event()
        reconciler = Reconciler(
            api, Recorder(api, "test"), known, Settings(), Uses(), lambda: (), wake=lambda _: woken.set(), fence=_leads
        )
        try:
            await reconciler.reconcile(KEY)
            await asyncio.wait_for(woken.wait(), PATIENCE_S)
            with pytest.raises(ApiError):  # so that the operator tries it again
                await reconciler.reconcile(KEY)
            events = list(api.events)
            assert "ClaimRefused" in {each["reason"] for each in events}
            with pytest.raises(ApiError):
                await reconciler.reconcile(KEY)
            assert api.events == events, "the same is told once"
            told = api.conditions()["Ready"]
            assert (told["status"], told["reason"]) == ("False", "ClaimRefused")
            assert "PersistentVolumeClaim data" in told["message"]
            assert "exceeded quota: small" in told["message"]
            assert api.status["phase"] == "Pending"
            api.refusal = None
            await reconciler.reconcile(KEY)
            assert api.made == [("PersistentVolumeClaim", "data")]
            assert api.conditions()["Ready"]["reason"] != "ClaimRefused"
        finally:
            reconciler.close()

    asyncio.run(story())


@promise("S-209")
def test_a_plain_claim_reports_its_refused_datastore_and_gets_it_once_accepted() -> None:
    api, known = Api(), informers()
    known.claims.put(plain_claim())
    known.classes.put(storage_class())

    async def story() -> None:
        plain = PlainClaims(api, known, Recorder(api, "test"))
        for _ in range(2):
            with pytest.raises(ApiError):
                await plain.provision(KEY)
        said = [(each["type"], each["reason"]) for each in api.events]
        assert said == [("Warning", "DatastoreRefused")]
        assert "exceeded quota: small" in api.events[0]["message"]
        api.refusal = ENDS
        assert await plain.provision(KEY) is None, "nothing comes any more in a namespace that ends"
        api.refusal = None
        await plain.provision(KEY)
        assert api.made == [("Datastore", "data")]

    asyncio.run(story())
