"""Digits on a real node: trained by TrainingJobs, saved, served by two replicas, rolled and rolled back, damaged."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.controlled import condition, datastore_of
from tests.cluster.fixtures import Site, Storage
from tests.cluster.image import SERVER, image_archive
from tests.cluster.kube import Kube, Manifest
from tests.cluster.layout import REPOSITORY
from tests.promises import promise
from tests.servers import boto_client, make_bucket

pytestmark = [pytest.mark.e2e_models, pytest.mark.own_node, pytest.mark.timeout(1200, func_only=True)]
READY_S = 240.0
JOBS = "trainingjobs.datastore.dev"
SERVING: dict[str, Any] = {
    "model": "digits",
    "alias": "prod",
    "replicas": 2,
    "image": SERVER.image,
    "resources": {"requests": {"cpu": "200m", "memory": "64Mi"}},
    "template": {"imagePullPolicy": "Never"},
}


class Models:
    """A namespace with a Datastore `runs` and the keys of a central bucket, which a StorageClass makes its store of."""

    def __init__(self, kube: Kube, storage: Storage, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace
        self.s3 = boto_client(storage.here)
        self.runs, self.central = (make_bucket(storage.here, f"{each}-{namespace}") for each in ("runs", "central"))
        here = storage.here
        keys = {"AWS_ACCESS_KEY_ID": here.access_key, "AWS_SECRET_ACCESS_KEY": here.secret_key}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys}
        kube.apply(secret, namespace=namespace)
        s3 = {"bucket": self.runs, "endpoint": storage.endpoint, "credentialsSecret": "keys"}
        kube.apply(datastore_of("runs", {"s3": s3}), namespace=namespace)
        self.storage_class: Manifest = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": f"models-{namespace}", "annotations": {"datastore.dev/models": "true"}},
            "provisioner": "csi.datastore.dev",
            "parameters": {
                "bucket": self.central,
                "endpoint": storage.endpoint,
                "secretName": "keys",
                "secretNamespace": "${pvc.namespace}",
            },
        }

    def key(self, path: str) -> str:
        """Of a path of the store, in the central bucket."""
        return f"{self.namespace}/models/digits/{path}"

    def train(self, image: str, saved: int, *others: int) -> None:
        """TrainingJobs for so many steps, side by side, into `runs`; one of them saves what it made."""
        program = (REPOSITORY / "examples" / "serving" / "train.py").read_bytes()
        self.s3.put_object(Bucket=self.runs, Key="train.py", Body=program)
        for each in (saved, *others):
            # Few steps are meant to be too few, of which the library warns.
            command = ["python", "-W", "ignore", "/data/train.py", f"/data/{each}", str(each)]
            spec: dict[str, Any] = {"framework": "none", "image": image, "command": command}
            spec |= {"template": {"imagePullPolicy": "Never"}, "datastores": [{"name": "runs", "path": "/data"}]}
            spec |= {"save": {"model": "digits", "from": f"/data/{each}"}} if each == saved else {}
            self.kube.apply(object_of("TrainingJob", f"steps-{each}", spec), namespace=self.namespace)
        where: dict[str, Any] = {"namespace": self.namespace, "limit_s": READY_S}
        for each in (saved, *others):
            self.kube.wait_condition(JOBS, f"steps-{each}", "Succeeded", **where)
        self.kube.wait_condition(JOBS, f"steps-{saved}", "Saved", **where)

    def saved_by(self, steps: int) -> Manifest:
        """The version that a TrainingJob saved: the status of its ModelVersion."""
        job = self.kube.get(JOBS, f"steps-{steps}", namespace=self.namespace) or {}
        name = job["status"]["modelVersion"]
        found = self.kube.get("modelversions.datastore.dev", name, namespace=self.namespace) or {}
        self.check_lineage(found["status"], job)
        return dict(found["status"])

    def check_lineage(self, status: Manifest, job: Manifest) -> None:
        """The manifest in the store says which TrainingJob the version is of."""
        found = self.s3.get_object(Bucket=self.central, Key=self.key(f"{status['version']}.json"))
        lineage = json.loads(found["Body"].read())["lineage"]
        assert lineage["trainingJobUID"] == job["metadata"]["uid"]

    def move(self, alias: str, version: int) -> None:
        """The Model says what an alias means."""
        change = {"spec": {"aliases": [{"name": alias, "version": version}]}}
        self.kube.patch("models.datastore.dev", "digits", change, namespace=self.namespace)

    def version(self, name: str, **spec: Any) -> Manifest:
        """Make a ModelVersion, and wait until its Job is done: its status."""
        self.kube.apply(object_of("ModelVersion", name, {"model": "digits", **spec}), namespace=self.namespace)
        where = {"namespace": self.namespace, "limit_s": READY_S}
        self.kube.wait_condition("modelversions.datastore.dev", name, "Ready", **where)  # type: ignore[arg-type]
        found = self.kube.get("modelversions.datastore.dev", name, namespace=self.namespace) or {}
        return dict(found["status"])

    def save(self, steps: int) -> Manifest:
        """Save what was trained, by a manifest."""
        source = {"datastore": "runs", "path": str(steps)}
        job = self.kube.get(JOBS, f"steps-{steps}", namespace=self.namespace) or {}
        origin = {"trainingJob": f"steps-{steps}", "trainingJobUID": job["metadata"]["uid"]}
        status = self.version(f"steps-{steps}", **{"from": source}, origin=origin)
        self.check_lineage(status, job)
        return status


def object_of(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


class Served:
    """The Serving `digits` of a namespace."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace

    def status(self) -> Manifest:
        found = self.kube.get("servings.datastore.dev", "digits", namespace=self.namespace) or {}
        return dict(found.get("status") or {})

    def wait(self, version: int, phase: str = "Ready", degraded: str = "AsWanted") -> Manifest:
        """Until the Serving is in the phase with this version, and degraded for this reason: its status then."""
        status: Manifest = {}

        def reached() -> bool:
            status.clear()
            status.update(self.status())
            told = condition({"status": status}, "Degraded").get("reason")
            return (status.get("version"), status.get("phase"), told) == (version, phase, degraded)

        try:
            self.kube.wait_for(f"version {version} {phase}", reached, limit_s=READY_S, namespace=self.namespace)
        finally:
            print(json.dumps(status, indent=1))
        return status


class Client:
    """A pod that asks for digits all the time, by the Service's name, and tries nothing twice."""

    def __init__(self, kube: Kube, site: Site, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace
        container = {
            **site.container("/opt/digits/bin/python", "-u", "client.py", f"digits.{namespace}.svc:8500", "3600"),
            "image": SERVER.image,
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "client"},
            "spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0},
        }
        kube.apply(pod, namespace=namespace)
        kube.wait_phase("client", "Running", namespace=namespace, limit_s=READY_S)

    def counts(self) -> Manifest:
        """What it has counted until now."""
        lines = self.kube.logs("client", namespace=self.namespace).splitlines()
        return dict(json.loads(lines[-1])) if lines else {"answers": 0, "failed": 0, "versions": {}, "digits": {}}

    def wait(self, version: int, more: int = 60) -> Manifest:
        """Until so many more requests were answered by this version."""

        def answers() -> int:
            return int(self.counts()["versions"].get(str(version), 0))

        enough = answers() + more
        what = f"{more} answers of version {version}"
        self.kube.wait_for(what, lambda: answers() >= enough, limit_s=READY_S, namespace=self.namespace)
        return self.counts()


def check_autoscaler(kube: Kube, namespace: str) -> None:
    """It finds its Deployment. How many pods it wants, a metrics server would have to say, which is not here."""

    def found() -> Manifest:
        return kube.get("horizontalpodautoscalers.autoscaling", "digits", namespace=namespace) or {}

    def finds() -> bool:
        return condition(found(), "AbleToScale").get("status") == "True"

    kube.wait_for("the autoscaler to find its Deployment", finds, limit_s=READY_S, namespace=namespace)
    spec: Manifest = found()["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "digits"}
    assert (spec["scaleTargetRef"], spec["minReplicas"], spec["maxReplicas"]) == (target, 2, 3)


@pytest.fixture(scope="module")
def server_image(site: Site) -> None:
    """Built, and on the node: minutes that are not the test's."""
    assert site.own is not None
    site.own.load(image_archive(SERVER))


@pytest.fixture
def models(kube: Kube, storage: Storage, namespace: str) -> Iterator[Models]:
    made = Models(kube, storage, namespace)
    kube.apply(made.storage_class)
    yield made
    kube.delete("storageclass", made.storage_class["metadata"]["name"])


@promise("S-396", "S-402", "S-410", "S-411", "S-412", "S-413", "S-419", "S-420")
def test_an_alias_moves_without_a_failed_request_and_a_damaged_version_is_not_served(
    site: Site,
    kube: Kube,
    models_controller: None,
    models: Models,
    train_image: str,
    server_image: None,
    namespace: str,
) -> None:
    """Version 1 (of a TrainingJob), 2, 1, 3 (damaged), 1."""
    kube.apply(object_of("Serving", "digits", SERVING), namespace=namespace)
    began = time.monotonic()
    models.train(train_image, 20, 50, 100)
    first = models.saved_by(20)
    assert first["version"] == 1
    one = first["digest"]
    models.move("prod", 1)
    served = Served(kube, namespace)
    status = served.wait(1)
    assert status["endpoint"] == f"digits.{namespace}.svc:8500"
    assert [(each["version"], each["digest"], each["ready"]) for each in status["pods"]] == [(1, one, True)] * 2

    client = Client(kube, site, namespace)
    assert client.wait(1)["digits"].keys() == {"0"}
    print(f"from submit to 60 answers of 2 pods: {time.monotonic() - began:.1f} s")
    two = models.save(100)["digest"]
    models.move("prod", 2)
    assert [(each["version"], each["digest"]) for each in served.wait(2)["pods"]] == [(2, two)] * 2
    client.wait(2)
    models.move("prod", 1)
    assert [(each["version"], each["digest"]) for each in served.wait(1)["pods"]] == [(1, one)] * 2
    assert one != two
    counts = client.wait(1)
    print("two rolls:", json.dumps(counts))
    assert (counts["failed"], counts["failures"]) == (0, [])

    scaled = {"spec": {"replicas": None, "autoscaling": {"minReplicas": 2, "maxReplicas": 3}}}
    kube.patch("servings.datastore.dev", "digits", scaled, namespace=namespace)
    assert models.save(50)["version"] == 3
    bucket, key = models.central, models.key("3/weights.npz")
    found = models.s3.get_object(Bucket=bucket, Key=key)
    body = bytearray(found["Body"].read())
    saved = hashlib.sha256(body).hexdigest()
    body[len(body) // 2] ^= 1
    models.s3.put_object(Bucket=bucket, Key=key, Body=bytes(body), Metadata=found["Metadata"])
    kube.patch("servings.datastore.dev", "digits", {"spec": {"alias": None, "version": 3}}, namespace=namespace)
    status = served.wait(3, "Degraded", "VersionDamaged")
    now = hashlib.sha256(body).hexdigest()
    assert f"digits/3/weights.npz: was saved with sha256 {saved}, and has {now} now" in status["message"]
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert conditions["Degraded"] == ("True", "VersionDamaged")
    assert conditions["Ready"][0] == "True"
    kube.patch("servings.datastore.dev", "digits", {"spec": {"alias": "prod", "version": None}}, namespace=namespace)
    served.wait(1)
    counts = client.wait(1)
    print("at the end:", json.dumps(counts))
    assert (counts["failed"], counts["digits"].keys()) == (0, {"0"})
    assert "3" not in counts["versions"]
    check_autoscaler(kube, namespace)

    kube.delete("pod", "client", namespace=namespace)
    kube.delete("servings.datastore.dev", "digits", namespace=namespace)

    def gone() -> bool:
        # The pods, too: the kubelet looks into their mounts when they end, and the S3 server goes after the test.
        return not kube.items("deployments,services,pods", namespace=namespace, selector="datastore.dev/serving")

    kube.wait_for("its objects gone", gone, limit_s=READY_S, namespace=namespace)
