"""What the API server itself refuses, before any controller looks: the limits and CEL rules of the CRDs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from datastore.api.datastore import Datastore
from tests.cluster.cluster import Cluster
from tests.cluster.kube import Kube, KubeError
from tests.cluster.layout import REPOSITORY
from tests.promises import promise

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(300, func_only=True)]

SPACE = "kinds"


@pytest.fixture(scope="module")
def kube(api_server: Cluster) -> Kube:
    """An API server with the CRDs, and a namespace of our own."""
    made = Kube(api_server.kubeconfig)
    made.kubectl("apply", "--server-side", f"--filename={REPOSITORY / 'manifests' / 'base' / 'crd.yaml'}")
    made.kubectl("wait", "--for=condition=Established", "--timeout=120s", "crd", "--all")
    made.kubectl("create", "namespace", SPACE)
    return made


def made(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


VERSION = {"model": "digits", "from": {"datastore": "runs", "path": "7"}, "labels": {"a": "b"}, "aliases": ["canary"]}
SERVING = {"model": "digits", "alias": "prod", "replicas": 2}


@promise("S-390")
@pytest.mark.parametrize(
    ("kind", "name", "spec", "words"),
    [
        ("Model", "a.b", {}, "metadata.name must have at most 63"),
        ("ModelVersion", "v", {"model": "digits"}, "exactly one of from"),
        ("ModelVersion", "v", {**VERSION, "version": 1}, "exactly one of from"),
        ("ModelVersion", "v", {"model": "Digits", "version": 1}, "spec.model"),
        ("ModelVersion", "v", {**VERSION, "aliases": ["latest"]}, "latest always means the newest version"),
        ("ModelVersion", "v", {**VERSION, "from": {"datastore": "runs", "path": "../7"}}, "spec.from.path.*'\\.\\.'"),
        ("ModelVersion", "v", {**VERSION, "from": {"datastore": "runs", "path": "7/.."}}, "spec.from.path.*'\\.\\.'"),
        ("Serving", "s", {"model": "digits"}, "exactly one of version and alias"),
        ("Serving", "s", {**SERVING, "version": 1}, "exactly one of version and alias"),
        ("Serving", "s", {**SERVING, "autoscaling": {"maxReplicas": 2}}, "at most one of replicas and autoscaling"),
        (
            "Serving",
            "s",
            {"model": "digits", "alias": "prod", "autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
            "minReplicas must not be above",
        ),
    ],
)
def test_a_wrong_object_is_refused(kube: Kube, kind: str, name: str, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(KubeError, match=words):
        kube.apply(made(kind, name, spec), namespace=SPACE)


@promise("S-410")
def test_a_serving_is_scaled_as_a_deployment_is(kube: Kube) -> None:
    kube.apply(made("Serving", "scaled", SERVING), namespace=SPACE)
    kube.kubectl("scale", "serving", "scaled", f"--namespace={SPACE}", "--replicas=0")
    assert (kube.get("servings", "scaled", namespace=SPACE) or {})["spec"]["replicas"] == 0
    by_load = {"spec": {"replicas": None, "autoscaling": {"maxReplicas": 2}}}
    kube.patch("servings", "scaled", by_load, namespace=SPACE)
    with pytest.raises(KubeError, match="at most one of replicas and autoscaling"):
        kube.kubectl("scale", "serving", "scaled", f"--namespace={SPACE}", "--replicas=3")


A_BUCKET = {"s3": {"bucket": "digits"}}


@promise("S-204")
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"s3": {"bucket": "digits", "endpoint": "http://s3:99999"}}, "spec.s3.endpoint.*a port from 1 to 65535"),
        ({"s3": {"bucket": "digits", "endpoint": "https://[::1]:0/"}}, "spec.s3.endpoint.*a port from 1 to 65535"),
        ({"local": {"path": "/a/../b"}}, r"spec.local.path.*must not hold '\.\.'"),
        ({"glusterfs": {"servers": ["h"], "volume": "v", "path": "/.."}}, "spec.glusterfs.path.*must not hold"),
        ({**A_BUCKET, "capacity": 0}, "spec.capacity.*must be more than 0"),
        ({**A_BUCKET, "capacity": "0.0Gi"}, "spec.capacity.*must be more than 0"),
        ({**A_BUCKET, "capacity": "8Ei"}, "spec.capacity.*less than 8Ei"),
        ({**A_BUCKET, "capacity": "9000000000Gi"}, "spec.capacity.*less than 8Ei"),
        ({**A_BUCKET, "cache": {"size": "0"}}, "spec.cache.size.*must be more than 0"),
        ({**A_BUCKET, "metadataTTL": "25h"}, "spec.metadataTTL.*from 0 to 24h"),
        ({**A_BUCKET, "metadataTTL": "86400.5"}, "spec.metadataTTL.*from 0 to 24h"),
        ({**A_BUCKET, "metadataTTL": 86401}, "spec.metadataTTL.*from 0 to 24h"),
        ({**A_BUCKET, "metadataTTL": -1}, "spec.metadataTTL.*from 0 to 24h"),
        ({**A_BUCKET, "writeBack": {"maxDelay": "23h61m"}}, "spec.writeBack.maxDelay.*from 0 to 24h"),
    ],
)
def test_a_value_beyond_its_limits_is_refused_at_once(kube: Kube, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(KubeError, match=words):
        kube.apply(made("Datastore", "d", spec), namespace=SPACE)
    with pytest.raises(ValidationError):
        Datastore.model_validate(made("Datastore", "d", spec))


@promise("S-204")
def test_a_backend_that_no_cluster_serves_is_refused_at_once(kube: Kube) -> None:
    with pytest.raises(KubeError, match=r"spec.sftp.*for laptops only \(datastore mount\)"):
        kube.apply(made("Datastore", "d", {"sftp": {"host": "h", "path": "/a"}}), namespace=SPACE)


@promise("S-204")
@pytest.mark.parametrize(
    "spec",
    [
        {"s3": {"bucket": "digits", "endpoint": "https://[::1]:65535/"}},
        {"s3": {"bucket": "digits", "endpoint": "http://s3_1"}},
        {"local": {"path": "/a/..b"}},
        {**A_BUCKET, "capacity": 1, "metadataTTL": 86400},
        {**A_BUCKET, "capacity": "+.5Gi", "metadataTTL": "24h"},
        {**A_BUCKET, "capacity": "1e3", "metadataTTL": "0"},
        {**A_BUCKET, "metadataTTL": "1h30m0.5s", "writeBack": {"maxDelay": "250ms"}},
    ],
)
def test_a_value_within_its_limits_is_taken(kube: Kube, spec: dict[str, Any]) -> None:
    Datastore.model_validate(made("Datastore", "d", spec))
    kube.apply(made("Datastore", "d", spec), namespace=SPACE)
    kube.delete("datastore", "d", namespace=SPACE)


@promise("S-47")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("conflict", "fail", "conflict: fail is for s3 only"),
        ("writeBack", {}, "writeBack is for s3 only"),
        ("uploadLimit", "1Mi", "uploadLimit is for s3 only"),
    ],
)
def test_fields_for_buckets_are_refused_for_other_backends(kube: Kube, field: str, value: object, words: str) -> None:
    """Not with a StorageClass, of which the API server does not know the backend."""
    with pytest.raises(KubeError, match=words):
        kube.apply(made("Datastore", "d", {"nfs": {"server": "h", "path": "/a"}, field: value}), namespace=SPACE)
    for backend in ({"s3": {"bucket": "digits"}}, {"storageClassName": "c"}):
        kube.apply(made("Datastore", "d", {**backend, field: value}), namespace=SPACE)
        kube.delete("datastore", "d", namespace=SPACE)


@promise("S-390")
def test_fields_that_say_which_bytes_it_is_are_immutable(kube: Kube) -> None:
    kube.apply(made("Model", "digits", {"store": "models"}), namespace=SPACE)
    kube.apply(made("ModelVersion", "v", VERSION), namespace=SPACE)
    kube.apply(made("Serving", "s", SERVING), namespace=SPACE)

    for kind, name, spec, field in (
        ("Model", "digits", {"store": "other"}, "store"),
        ("ModelVersion", "v", {**VERSION, "model": "other"}, "model"),
        ("ModelVersion", "v", {**VERSION, "from": {"datastore": "runs", "path": "8"}}, "from"),
        ("ModelVersion", "v", {**VERSION, "labels": {"a": "c"}}, "labels"),
        ("ModelVersion", "v", {**VERSION, "aliases": ["prod"]}, "aliases"),
        ("Serving", "s", {**SERVING, "model": "other"}, "model"),
    ):
        with pytest.raises(KubeError, match=f"{field} is immutable"):
            kube.apply(made(kind, name, spec), namespace=SPACE)

    kube.apply(made("Serving", "s", {"model": "digits", "version": 2, "replicas": 3}), namespace=SPACE)
    assert "digits" in kube.kubectl("get", "mdl,mv,srv", f"--namespace={SPACE}")
