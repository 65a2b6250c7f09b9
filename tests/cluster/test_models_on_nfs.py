"""A store of models on a central NFS host: made on first use, written by Jobs of a user without rights, mounted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.controlled import condition, datastore_of, secret_of
from tests.cluster.fixtures import Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.promises import promise
from tests.servers import boto_client, make_bucket

pytestmark = [pytest.mark.e2e_models_long, pytest.mark.own_node, pytest.mark.timeout(1500, func_only=True)]
LIMIT_S = 300.0
GONE_S = 300.0
WEIGHTS = bytes(range(256)) * 40_000
READS = "import hashlib; print(hashlib.sha256(open('/model/weights', 'rb').read()).hexdigest(), flush=True)"


class Team:
    """A namespace with a Datastore `runs` in a bucket, and no store."""

    def __init__(self, kube: Kube, storage: Storage, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace
        bucket = make_bucket(storage.here, f"runs-{namespace}")
        boto_client(storage.here).put_object(Bucket=bucket, Key="7/weights", Body=WEIGHTS)
        kube.apply(secret_of(storage.here), namespace=namespace)
        s3 = {"bucket": bucket, "endpoint": storage.endpoint, "credentialsSecret": "keys"}
        kube.apply(datastore_of("runs", {"s3": s3}), namespace=namespace)

    def version(self, name: str, **spec: Any) -> Manifest:
        """A ModelVersion, when it is Ready: its status."""
        body = {"apiVersion": "datastore.dev/v1alpha1", "kind": "ModelVersion", "metadata": {"name": name}}
        self.kube.apply({**body, "spec": {"model": "digits", **spec}}, namespace=self.namespace)

        def ready() -> bool:
            found = self.get("mv", name)
            return condition(found, "Ready").get("status") == "True" and "claim" in found["status"]

        self.kube.wait_for(f"version {name}", ready, limit_s=LIMIT_S, namespace=self.namespace)
        return dict(self.get("mv", name)["status"])

    def get(self, kind: str, name: str) -> Manifest:
        return self.kube.get(kind, name, namespace=self.namespace) or {}


@pytest.fixture
def team(kube: Kube, storage: Storage, managed: None, models_controller: None, namespace: str) -> Iterator[Team]:
    kube.kubectl("annotate", "storageclass", "nfs-managed", "datastore.dev/models=true")
    yield Team(kube, storage, namespace)
    kube.patch("datastore", "models", {"spec": {"reclaimPolicy": "Delete"}}, namespace=namespace)
    kube.delete("datastore", "models", namespace=namespace, wait=False)  # its server goes with it
    gone = partial(kube.get, "datastore", "models", namespace=namespace)
    kube.wait_for("end of the store", lambda: gone() is None, limit_s=GONE_S, namespace=namespace)


@promise("S-392", "S-393", "S-396", "S-397", "S-402")
def test_a_store_on_a_central_host(site: Site, kube: Kube, team: Team) -> None:
    """Saved, saved again, an alias moved, read by a pod, verified, deleted."""
    source = {"from": {"datastore": "runs", "path": "7"}}
    one = team.version("one", **source, aliases=["prod"])
    assert (one["version"], one["files"], one["bytes"]) == (1, 1, len(WEIGHTS))
    assert team.get("datastore", "models")["status"]["location"].startswith("nfs://")
    assert team.version("two", **source, force=True)["version"] == 2
    assert team.version("verified", version=1)["digest"] == one["digest"]
    moved = {"spec": {"aliases": [{"name": "prod", "version": 2}]}}
    kube.patch("mdl", "digits", moved, namespace=team.namespace)

    def is_moved() -> bool:
        return {"name": "prod", "version": 2} in team.get("mdl", "digits")["status"]["aliases"]

    kube.wait_for("prod at 2", is_moved, limit_s=LIMIT_S, namespace=team.namespace)
    container = {**site.container("python3", "-c", READS), "volumeMounts": [{"name": "m", "mountPath": "/model"}]}
    volume = {"name": "m", "persistentVolumeClaim": {"claimName": "two"}}
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    kube.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": spec}, namespace=team.namespace
    )
    kube.wait_phase("reader", "Succeeded", namespace=team.namespace, limit_s=LIMIT_S)
    assert kube.logs("reader", namespace=team.namespace).strip() == hashlib.sha256(WEIGHTS).hexdigest()
    kube.delete("pod", "reader", namespace=team.namespace)
    for name in ("verified", "one"):
        kube.delete("mv", name, namespace=team.namespace, wait=False)
        kube.wait_for(f"end of {name}", lambda each=name: team.get("mv", each) == {}, limit_s=LIMIT_S)  # type: ignore[misc]
    assert team.get("mv", "two")["status"]["version"] == 2
