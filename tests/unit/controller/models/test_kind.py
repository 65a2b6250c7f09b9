"""datastore.controller.models.kind: what keeps a ModelVersion from being deleted, and what the cluster refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from datastore.api.names import FINALIZER, MODEL, MODEL_VERSION, SERVING
from datastore.api.resources import (
    CLAIMS,
    DATASTORES,
    EXPORTS,
    MODELS,
    PODS,
    SERVINGS,
    VERSIONS,
    VOLUMES,
    Resource,
)
from datastore.controller.models.decide import SAME, SAVED
from datastore.controller.models.job import waiting_for
from datastore.controller.models.kind import ModelKind, Settings
from datastore.controller.models.volume import OWNED_BY, VERSION_OF
from datastore.controller.runtime.client import ApiError
from tests.promises import promise
from tests.unit.controller.models.test_decide import datastore, volume
from tests.unit.controller.playedclient import PlayedClient

NOW = "2026-01-01T00:00:00Z"
KEY = ("team", "again")


def claim(name: str, uid: str) -> dict[str, Any]:
    """Return the claim of a ModelVersion, which shows version 7 of the model."""
    marks = {"labels": {OWNED_BY: uid}, "annotations": {VERSION_OF: "team/digits:7"}}
    owners = [{"kind": "ModelVersion", "name": name}]
    metadata = {"name": name, "namespace": "team", "uid": f"claim-{uid}", "ownerReferences": owners, **marks}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}


class Claimed(PlayedClient):
    """A namespace with the claims of two ModelVersions that stand for the same version, KEY and another one."""

    def __init__(self, own: dict[str, Any]) -> None:
        super().__init__(own)
        self.claims = {"again": claim("again", "u-2"), "first": claim("first", "u-1")}
        self.pods: list[dict[str, Any]] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return self.claims.get(name) if resource is CLAIMS else None

    async def list(
        self, resource: Resource, namespace: str, field_selector: str = "", label_selector: str = ""
    ) -> list[dict[str, Any]]:
        return {CLAIMS: [*self.claims.values()], PODS: self.pods}[resource]

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        self.claims.pop(name)
        return await super().delete(resource, namespace, name, uid)


def version(reason: str) -> dict[str, Any]:
    """Return a ModelVersion that is being deleted. reason: that of its condition Saved."""
    metadata = {"name": "again", "namespace": "team", "uid": "u-2", "generation": 1, "finalizers": [FINALIZER]}
    saved = {"type": "Saved", "status": "True", "reason": reason, "message": "", "lastTransitionTime": NOW}
    return {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "ModelVersion",
        "metadata": {**metadata, "deletionTimestamp": NOW},
        "spec": {"model": "digits", "from": {"datastore": "runs", "path": "7"}},
        "status": {"phase": "Ready", "version": 7, "conditions": [saved]},
    }


def reconcile_once(api: Claimed) -> None:
    """Reconcile KEY, while a Serving and its pod use its version."""
    kind = ModelKind(Settings(job_image="image"), api, lambda: None)
    served = {"metadata": {"name": "s", "namespace": "team", "uid": "s"}, "spec": {"model": "digits", "version": 7}}
    labels = {SERVING: "s", MODEL: "digits", MODEL_VERSION: "7"}
    api.pods.append({"metadata": {"name": "s-0", "labels": labels}, "spec": {}})
    tell = {watch.resource: watch.tell for watch in kind.watches()}
    tell[SERVINGS]({"type": None, "object": served})
    tell[VERSIONS]({"type": None, "object": api.own})
    _, reconcile = kind.queues()[0]

    async def once() -> None:
        await reconcile(KEY)

    asyncio.run(once())


@promise("S-397", "S-406")
def test_a_version_that_others_use_is_not_deleted_and_they_are_named() -> None:
    api = Claimed(version(SAVED))
    reconcile_once(api)
    users = "not deleted: in use by Serving s, ModelVersion first, pod s-0 of Serving s"
    assert api.applied[-1]["status"]["message"] == users
    assert not api.deleted


@promise("S-397")
def test_a_modelversion_that_keeps_its_bytes_is_deleted_while_others_use_them() -> None:
    """Its save found a version with the same bytes."""
    api = Claimed(version(SAME))
    reconcile_once(api)
    assert api.deleted == [("persistentvolumeclaims", "again")]
    assert "finalizers" not in api.applied[-1]["metadata"]


class WithStore(PlayedClient):
    """A namespace with the volume of a store."""

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return volume("models") if resource is VOLUMES else None


QUOTA = ApiError(403, "Forbidden", 'jobs.batch "x" is forbidden: exceeded quota: small, used: 2, limited: 2')


def waiting(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "digits", "namespace": "team", "uid": "u-3", "generation": 1, "finalizers": [FINALIZER]}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.mark.parametrize(
    ("resource", "body", "condition"),
    [
        (VERSIONS, waiting("ModelVersion", {"model": "digits", "version": 7}), "Ready"),
        (
            EXPORTS,
            waiting("ModelExport", {"model": "digits", "to": {"datastore": "models", "path": "out"}}),
            "Complete",
        ),
        (MODELS, waiting("Model", {"aliases": [{"name": "prod", "version": 7}]}), "StoreUpdated"),
    ],
)
@promise("S-393")
def test_a_refused_job_is_reported_and_made_once_the_cluster_accepts_it(
    resource: Resource, body: dict[str, Any], condition: str
) -> None:
    api = WithStore(body, QUOTA)
    kind = ModelKind(Settings(job_image="image"), api, lambda: None)
    tell = {watch.resource: watch.tell for watch in kind.watches()}
    store = datastore("models")
    store["metadata"]["uid"] = "d-1"
    tell[DATASTORES]({"type": None, "object": store})
    tell[MODELS]({"type": None, "object": waiting("Model", {})})
    tell[resource]({"type": None, "object": body})
    order = (VERSIONS, MODELS, EXPORTS)
    _, reconcile = kind.queues()[order.index(resource)]

    async def twice() -> None:
        with pytest.raises(ApiError):  # so that the operator tries it again
            await reconcile(("team", "digits"))
        told = api.conditions[condition]
        assert (told["status"], told["reason"]) == ("False", "Refused")
        assert "exceeded quota: small" in told["message"]
        assert [(each["type"], each["reason"]) for each in api.events] == [("Warning", "Refused")]
        api.refusal = None
        await reconcile(("team", "digits"))
        assert [kind for kind, _ in api.made] == ["Job"]

    asyncio.run(twice())


@promise("S-393")
def test_a_job_without_a_pod_says_where_the_reason_is() -> None:
    began: dict[str, Any] = {"startTime": NOW, "active": 0}
    job: dict[str, Any] = {"metadata": {"name": "digits-save"}, "status": began}
    assert waiting_for({**job, "status": {}}, []) == "", "it was made just now"
    assert "kubectl describe job digits-save" in waiting_for(job, [])
    assert waiting_for({**job, "status": {**began, "active": 1}}, []) == ""
    assert waiting_for({**job, "status": {**began, "conditions": [{"type": "Complete", "status": "True"}]}}, []) == ""


@promise("S-397")
def test_a_version_whose_name_has_anothers_claim_takes_its_bytes_with_it() -> None:
    class Taken(WithStore):
        async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
            return claim("again", "of another") if resource is CLAIMS else await super().get(resource, namespace, name)

    body = version(SAVED)
    api = Taken(body)
    kind = ModelKind(Settings(job_image="image"), api, lambda: None)
    tell = {watch.resource: watch.tell for watch in kind.watches()}
    store = datastore("models")
    tell[DATASTORES]({"type": None, "object": {**store, "metadata": {"uid": "u-9", **store["metadata"]}}})
    tell[VERSIONS]({"type": None, "object": body})

    async def once() -> None:
        await kind.queues()[0][1](KEY)

    asyncio.run(once())
    assert [kind for kind, _ in api.made] == ["Job"]
    assert not api.deleted
