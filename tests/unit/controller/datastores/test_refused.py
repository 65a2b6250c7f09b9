"""datastore.controller.datastores: what the cluster does not accept, as a quota says, is told and tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from datastore.api.names import FINALIZER
from datastore.api.volumecontext import DRIVER
from datastore.controller.datastores.informers import Informers
from datastore.controller.datastores.plainclaims import PlainClaims
from datastore.controller.datastores.reconciler import Reconciler
from datastore.controller.datastores.secretwatch import Uses
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import ApiError
from datastore.controller.runtime.recorder import Recorder
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.unit.controller.playedclient import PlayedClient

KEY = ("team", "data")
QUOTA = ApiError(403, "Forbidden", '"data" is forbidden: exceeded quota: small, requested: 1, used: 3, limited: 3')
ENDS = ApiError(403, "Forbidden", "unable to create new content in namespace team because it is being terminated")


def datastore() -> dict[str, Any]:
    metadata = {"name": "data", "namespace": "team", "uid": "0b6d", "generation": 1, "finalizers": [FINALIZER]}
    spec = {"claim": {"storageClassName": "disk"}}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": metadata, "spec": spec}


def plain_claim() -> dict[str, Any]:
    spec = {"storageClassName": "s3", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "data", "namespace": "team", "uid": "c-1"}
    return {"kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec, "status": {}}


def storage_class() -> dict[str, Any]:
    parameters = {"bucket": "all", "secretName": "keys", "secretNamespace": "team"}
    return {"metadata": {"name": "s3", "uid": "k-1"}, "provisioner": DRIVER, "parameters": parameters}


def _leads() -> None:
    """This replica may write."""


def informers() -> Informers:
    return Informers(lambda _: None, lambda _: None, lambda _: True)


@promise("S-71")
def test_a_refused_claim_is_reported_and_made_once_the_cluster_accepts_it() -> None:
    api, known = PlayedClient(datastore(), QUOTA), informers()
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
            told = api.conditions["Ready"]
            assert (told["status"], told["reason"]) == ("False", "ClaimRefused")
            assert "PersistentVolumeClaim data" in told["message"]
            assert "exceeded quota: small" in told["message"]
            assert api.applied[-1]["status"]["phase"] == "Pending"
            api.refusal = None
            await reconciler.reconcile(KEY)
            assert api.made == [("PersistentVolumeClaim", "data")]
            assert api.conditions["Ready"]["reason"] != "ClaimRefused"
        finally:
            reconciler.close()

    asyncio.run(story())


@promise("S-209")
def test_a_plain_claim_reports_its_refused_datastore_and_gets_it_once_accepted() -> None:
    api, known = PlayedClient(plain_claim(), QUOTA), informers()
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
