"""Models on a real node: saved by a Job, killed and tried again, mounted read-only by a pod, verified, deleted."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from datastore.api.source import S3Location
from datastore.models.errors import VersionInUse
from datastore.models.exporting import export_tar_file
from datastore.models.ocilayout import export_layout
from datastore.models.opening import opened_storage
from datastore.models.progress import Progress
from datastore.models.registry import Models
from tests.cluster.controlled import condition, datastore_of, granted
from tests.cluster.fixtures import SYSTEM, Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.cluster.layout import REPOSITORY
from tests.contract.conftest import location_of
from tests.promises import promise
from tests.servers import boto_client, make_bucket
from tests.tools.mounting import COMMAND

pytestmark = [pytest.mark.e2e_models, pytest.mark.own_node, pytest.mark.timeout(1200, func_only=True)]
LIMIT_S = 240.0
FILES = {"weights": bytes(range(256)) * 4096, "assets/vocabulary": b"a b c", "assets/empty": b""}

KILL = """
import contextlib, os, pathlib, signal, sys, time
who, job, phase, limit_s = sys.argv[1].encode(), sys.argv[2], sys.argv[3].encode(), float(sys.argv[4])
def found():
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if who in (each / "environ").read_bytes():
                yield int(each.name)
def slow(pid):
    for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            pathlib.Path(f"/sys/fs/cgroup/cpu{path}/cpu.cfs_quota_us").write_text("20000")
def said():
    for each in pathlib.Path("/var/log/pods").glob(f"{job}-*/work/*.log"):
        with contextlib.suppress(OSError):
            yield each.read_bytes()
print("looking", flush=True)
until = time.monotonic() + limit_s
while not (pids := list(found())) and time.monotonic() < until:
    time.sleep(0.01)
for pid in pids if phase else ():
    slow(pid)
while phase and not any(phase in each for each in said()) and time.monotonic() < until:
    time.sleep(0.005)
for pid in pids:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
print(len(pids))
"""
"""On the node: kill -9 of what has this in its environment, as a Job says for whom it works, as soon as its log holds a
phase; without one as soon as it is there. Prints "looking", then how many processes that were. Until it is killed it
has a fifth of a processor, so that no phase is over before it is seen."""


class Project:
    """A namespace with a Datastore `runs` of which 7/ holds FILES, and one `models`, in buckets of one server."""

    def __init__(self, kube: Kube, storage: Storage, site: Site, name: str) -> None:
        self.kube, self.storage, self.site, self.name = kube, storage, site, name
        self.s3 = boto_client(storage.here)
        self.buckets = {each: make_bucket(storage.here, f"{each}-{name}") for each in ("runs", "models")}
        for path, body in FILES.items():
            self.s3.put_object(Bucket=self.buckets["runs"], Key=f"7/{path}", Body=body)
        here = storage.here
        keys = {"AWS_ACCESS_KEY_ID": here.access_key, "AWS_SECRET_ACCESS_KEY": here.secret_key}
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys}
        kube.apply(secret, namespace=name)
        for each, bucket in self.buckets.items():
            s3 = {"bucket": bucket, "endpoint": storage.endpoint, "credentialsSecret": "keys"}
            kube.apply(datastore_of(each, {"s3": s3}), namespace=name)

    def version(self, name: str, **spec: Any) -> None:
        made = {"apiVersion": "datastore.dev/v1alpha1", "kind": "ModelVersion", "metadata": {"name": name}}
        self.kube.apply({**made, "spec": {"model": "digits", **spec}}, namespace=self.name)

    def save(self, name: str, path: str = "7", **spec: Any) -> None:
        self.version(name, **{"from": {"datastore": "runs", "path": path}}, **spec)

    def get(self, name: str) -> Manifest:
        return self.kube.get("modelversion", name, namespace=self.name) or {}

    def ready(self, name: str) -> dict[str, Any]:
        self.kube.wait_for(
            f"version {name}",
            lambda: condition(self.get(name), "Ready").get("status") == "True" and "claim" in self.get(name)["status"],
            limit_s=LIMIT_S,
            namespace=self.name,
        )
        status: dict[str, Any] = self.get(name)["status"]
        return status

    def told(self, name: str, reason: str) -> str:
        """Wait until it is not Ready for this reason; the message."""

        def is_told() -> bool:
            return condition(self.get(name), "Ready").get("reason") == reason

        self.kube.wait_for(f"{reason} of {name}", is_told, limit_s=LIMIT_S, namespace=self.name)
        return condition(self.get(name), "Ready")["message"]

    def stored(self) -> list[str]:
        found = self.s3.list_objects_v2(Bucket=self.buckets["models"]).get("Contents", [])
        return [each["Key"] for each in found]

    def source(self) -> S3Location:
        """The store, as a laptop reaches it."""
        return location_of(self.storage.here, self.buckets["models"])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A verb of `datastore model`, as a person with a kubeconfig runs it."""
        environment = {**os.environ, "KUBECONFIG": str(self.kube.kubeconfig)}
        command = [COMMAND, "model", *arguments, "--namespace", self.name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    @contextmanager
    def killing(self, kind: str, name: str, verb: str, phase: str) -> Iterator[None]:
        """kill -9, in a phase, of what the Job of the object runs that the block makes."""
        own = self.site.own
        assert own is not None
        words = (f'"{kind} {self.name}/{name}"', f"{self.name}_{name}-{verb}", phase, str(LIMIT_S))
        command = own.entering("python3", "-c", KILL, *words)
        with subprocess.Popen(command, env=own.environment(), stdout=subprocess.PIPE, text=True) as killer:
            assert killer.stdout is not None
            assert killer.stdout.readline() == "looking\n"
            yield
            killed, _ = killer.communicate(timeout=2 * LIMIT_S)
        assert int(killed) > 0, f"nothing of {kind} {name} was there to be killed"

    def pods(self, job: str) -> list[Manifest]:
        found = self.kube.items("pods", namespace=self.name)
        return [each for each in found if each["metadata"]["name"].startswith(job)]


@pytest.fixture(scope="module")
def project(kube: Kube, site: Site, storage: Storage, models_controller: None) -> Iterator[Project]:
    made = Project(kube, storage, site, f"team-{uuid.uuid4().hex[:6]}")
    yield made
    kube.delete("namespace", made.name, wait=False)
    gone = f"end of namespace {made.name}"
    kube.wait_for(gone, lambda: kube.get("namespace", made.name) is None, limit_s=LIMIT_S, namespace=made.name)


@promise("S-393", "S-394", "S-395")
def test_a_manifest_is_saved_by_a_job_and_mounted_by_a_pod(project: Project) -> None:
    began = time.monotonic()
    project.save("digits-1", aliases=["prod"], labels={"accuracy": "0.97"})
    status = project.ready("digits-1")
    print(f"from the manifest to Ready: {time.monotonic() - began:.1f} s")
    assert (status["version"], status["files"], status["claim"]) == (1, 3, "digits-1")
    manifest = project.s3.get_object(Bucket=project.buckets["models"], Key="digits/1.json")["Body"].read()
    head = json.loads(manifest)
    assert head["digest"] == status["digest"]
    assert (head["lineage"]["datastore"], head["lineage"]["path"]) == ("runs", "7")
    assert head["labels"] == {"accuracy": "0.97"}
    model = project.kube.get("model", "digits", namespace=project.name) or {}
    assert model["status"]["aliases"] == [{"name": "prod", "version": 1}]
    assert model["status"]["latestVersion"] == 1

    script = (
        "import hashlib, os, pathlib\n"
        "root = pathlib.Path('/model')\n"
        "print(hashlib.sha256((root / 'weights').read_bytes()).hexdigest(), sorted(os.listdir(root)))\n"
        "try:\n    (root / 'new').write_text('x')\nexcept OSError as error:\n    print(error.strerror)\n"
    )
    container = project.site.container("python3", "-u", "-c", script)
    container["volumeMounts"] = [{"name": "model", "mountPath": "/model"}]
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": "digits-1"}}
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": spec}
    project.kube.apply(pod, namespace=project.name)
    project.kube.wait_phase("reader", "Succeeded", namespace=project.name, limit_s=LIMIT_S)
    said = project.kube.logs("reader", namespace=project.name)
    weights = next(each["sha256"] for each in head["entries"] if each["path"] == "weights")
    assert said.splitlines() == [f"{weights} ['assets', 'weights']", "Read-only file system"]
    project.kube.delete("pod", "reader", namespace=project.name)


@promise("S-398")
def test_a_killed_save_is_never_half_a_version_and_its_retry_completes(project: Project) -> None:
    """Kill -9 of the Job's process when it begins, when it has a number, and near its end."""
    body = os.urandom(1 << 20)
    for number in range(64):
        project.s3.put_object(Bucket=project.buckets["runs"], Key=f"big/{number:03d}", Body=body)
    for name, phase in {"whole": None, "at-once": "", "reading": '"reading"', "late": '"checking"'}.items():
        kill = nullcontext() if phase is None else project.killing("ModelVersion", name, "save", phase)
        with kill:
            project.save(name, "big", force=True)
        versions = {key for key in project.stored() if key.startswith("digits/") and key.endswith(".json")}
        status = project.ready(name)
        print(f"{name}: {len(versions)} versions then; saved as {status['version']}")
        assert (status["files"], status["bytes"]) == (64, 64 << 20)
        stored = [key for key in project.stored() if key.startswith(f"digits/{status['version']}/")]
        assert len(stored) == 64
        assert not [key for key in project.stored() if key.endswith(".saving")]
    assert status["version"] > 5, "the kill came when no number was taken"
    whole = {key.split("/")[1] for key in project.stored() if key.startswith("digits/") and key.count("/") > 1}
    heads = {key: project.s3.get_object(Bucket=project.buckets["models"], Key=key) for key in project.stored()}
    gone = {key for key, found in heads.items() if key.endswith(".json") and b'"removed"' in found["Body"].read()}
    assert not [number for number in whole if f"digits/{number}.json" in gone]


@promise("S-399")
def test_a_flipped_byte_of_the_store_is_found(project: Project) -> None:
    """By a ModelVersion that names a version of the store, before anybody gets it."""
    key = "digits/1/weights"
    found = project.s3.get_object(Bucket=project.buckets["models"], Key=key)
    body = bytearray(found["Body"].read())
    project.version("again", version=1)
    assert project.ready("again")["version"] == 1
    body[4711] ^= 1
    project.s3.put_object(Bucket=project.buckets["models"], Key=key, Body=bytes(body), Metadata=found["Metadata"])
    project.version("damaged", version=1)
    message = project.told("damaged", "VersionDamaged")
    assert re.search(r"digits/1/weights: was saved with sha256 [0-9a-f]{64}, and has [0-9a-f]{64} now", message)
    assert project.kube.get("pvc", "damaged", namespace=project.name) is None


@promise("S-402", "S-403")
def test_an_alias_moves_by_the_manifest_of_its_model(project: Project) -> None:
    """By a patch, by the command, not by a ModelVersion; what can't be is told, and nothing moves."""

    def stored() -> bytes:
        try:
            found = project.s3.get_object(Bucket=project.buckets["models"], Key="digits/aliases/canary")
        except project.s3.exceptions.NoSuchKey:
            return b""
        return bytes(found["Body"].read())

    def canary(number: int) -> None:
        change = {"spec": {"aliases": [{"name": "canary", "version": number}]}}
        project.kube.patch("models.datastore.dev", "digits", change, namespace=project.name)

    canary(2)
    moved = {"name": "canary", "version": 2}

    def is_moved() -> bool:
        model = project.kube.get("mdl", "digits", namespace=project.name) or {}
        return moved in model["status"]["aliases"]

    project.kube.wait_for("canary at 2", is_moved, limit_s=LIMIT_S, namespace=project.name)
    assert stored() == b"2\n"
    done = project.command("tag", "digits:1", "canary", "--cluster", "--expect", "2", "--wait")
    assert done.returncode == 0, done.stderr
    assert stored() == b"1\n"
    refused = project.command("tag", "digits:3", "canary", "--cluster", "--expect", "2")
    assert refused.returncode != 0
    assert "is at 1, not at 2" in refused.stderr
    project.version("canary", version=2, aliases=["canary"])
    assert "Model digits says what canary means" in project.ready("canary")["message"]
    canary(999)

    def told() -> Mapping[str, str]:
        return condition(project.kube.get("mdl", "digits", namespace=project.name) or {}, "StoreUpdated")

    def is_refused() -> bool:
        return told().get("reason") == "ModelNotFound"

    project.kube.wait_for("a refusal", is_refused, limit_s=LIMIT_S, namespace=project.name)
    assert "no version 999" in told()["message"]
    assert stored() == b"1\n"
    canary(1)
    project.kube.wait_for(
        "what the Model says", lambda: told()["status"] == "True", limit_s=LIMIT_S, namespace=project.name
    )
    assert stored() == b"1\n"
    canary(2)  # version 1 is deleted below
    project.kube.wait_for("canary at 2", is_moved, limit_s=LIMIT_S, namespace=project.name)


@promise("S-404", "S-405")
def test_a_version_is_exported_by_a_job_that_may_be_killed(project: Project) -> None:
    """Into a bucket by its server, killed when it reads; a damaged one is not exported."""
    number = project.get("whole")["status"]["version"]
    target = f"s3://{project.buckets['runs']}/out/big"
    done = project.command("export", f"digits:{number}", target, "--cluster", "--wait")
    assert done.returncode == 0, done.stderr
    listed = project.s3.list_objects_v2(Bucket=project.buckets["runs"], Prefix="out/big/")["Contents"]
    original = project.s3.list_objects_v2(Bucket=project.buckets["runs"], Prefix="big/")["Contents"]
    assert [(each["Key"], each["ETag"]) for each in listed] == [
        (f"out/{each['Key']}", each["ETag"]) for each in original
    ]

    spec = {"model": "digits", "version": number, "to": {"datastore": "runs", "path": "again"}}
    made = {"apiVersion": "datastore.dev/v1alpha1", "kind": "ModelExport", "metadata": {"name": "killed"}}
    with project.killing("ModelExport", "killed", "export", '"reading"'):
        project.kube.apply({**made, "spec": spec}, namespace=project.name)
    project.kube.wait_condition("mx", "killed", "Complete", namespace=project.name, limit_s=LIMIT_S)
    status = (project.kube.get("mx", "killed", namespace=project.name) or {})["status"]
    assert (status["version"], status["files"]) == (number, 64)
    found = project.s3.list_objects_v2(Bucket=project.buckets["runs"], Prefix="again/")["Contents"]
    assert [each["ETag"] for each in found] == [each["ETag"] for each in original]

    damaged = project.command("export", "digits:1", "runs/out/damaged", "--cluster", "--wait")
    assert damaged.returncode == 1, damaged.stderr
    assert re.search(r"digits/1/weights: was saved with sha256 [0-9a-f]{64}, and has [0-9a-f]{64} now", damaged.stderr)
    assert "Contents" not in project.s3.list_objects_v2(Bucket=project.buckets["runs"], Prefix="out/damaged")


@promise("S-406", "S-407")
def test_a_version_that_is_served_is_not_deleted(project: Project) -> None:
    """Who serves it is named, to kubectl and to a laptop with the same store; then it goes."""
    status = project.get("late")["status"]
    number = status["version"]
    serving = {"model": "digits", "version": number, "replicas": 0, "image": "localhost/none"}
    made = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Serving", "metadata": {"name": "pinned"}, "spec": serving}
    project.kube.apply(made, namespace=project.name)
    uid = (project.kube.get("srv", "pinned", namespace=project.name) or {})["metadata"]["uid"]
    note = f"digits/uses/{number}/{uid}"
    project.kube.wait_for("its note", lambda: note in project.stored(), limit_s=LIMIT_S, namespace=project.name)
    with opened_storage(project.source()) as storage, pytest.raises(VersionInUse) as refused:
        Models(storage).delete("digits", number)
    assert f"served by Serving {project.name}/pinned" in str(refused.value)

    labels = {"datastore.dev/model": "digits", "datastore.dev/version": str(number)}
    spec = {"containers": [{"name": "main", "image": "localhost/none", "imagePullPolicy": "Never"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-a-roll", "labels": labels}, "spec": spec}
    project.kube.apply(pod, namespace=project.name)
    project.kube.delete("modelversion", "late", namespace=project.name, wait=False)
    said = project.told("late", "VersionInUse")
    assert "Serving pinned" in said
    assert "pod of-a-roll" in said
    project.kube.delete("srv", "pinned", namespace=project.name)
    project.kube.wait_for("its end", lambda: note not in project.stored(), limit_s=LIMIT_S, namespace=project.name)
    assert f"digits/{number}.json" in project.stored()
    project.kube.delete("pod", "of-a-roll", namespace=project.name)
    project.kube.wait_for("end of late", lambda: project.get("late") == {}, limit_s=LIMIT_S, namespace=project.name)
    assert [key for key in project.stored() if key.startswith(f"digits/{number}/")] == []


@promise("S-397")
def test_a_version_that_is_used_is_not_deleted(project: Project) -> None:
    """An alias means it; when that is moved it goes, with its bytes, claim and volume."""
    volume = project.kube.get("pvc", "digits-1", namespace=project.name)
    assert volume is not None
    project.kube.delete("modelversion", "again", namespace=project.name)
    project.kube.delete("modelversion", "digits-1", namespace=project.name, wait=False)
    assert "prod" in project.told("digits-1", "VersionInUse")
    assert "digits/1.json" in project.stored()
    project.s3.delete_object(Bucket=project.buckets["models"], Key="digits/aliases/prod")
    project.kube.wait_for(
        "end of digits-1", lambda: project.get("digits-1") == {}, limit_s=LIMIT_S, namespace=project.name
    )
    assert [key for key in project.stored() if key.startswith("digits/1/")] == []

    def gone() -> bool:
        return project.kube.get("pv", volume["spec"]["volumeName"]) is None

    # Kubernetes takes its own finalizer off in its own time.
    project.kube.wait_for("end of its volume", gone, limit_s=LIMIT_S, namespace=project.name)


@promise("S-400")
def test_the_command_saves_on_the_cluster_and_follows(project: Project) -> None:
    save = ("save", "digits", "--cluster", "--wait", "-o", "json")
    done = project.command(*save, "--from", "runs/7", "--force", "--progress", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 3
    done = project.command(*save, "--from", "runs/absent")
    assert done.returncode == 1, done.stderr
    assert "absent" in done.stderr


@promise("S-404")
def test_archives_are_exported_through_a_mount(project: Project, tmp_path: Path) -> None:
    """A tar file and an OCI layout, with the bytes that the same export has on a laptop."""
    number = (project.kube.get("mdl", "digits", namespace=project.name) or {})["status"]["latestVersion"]
    bucket = project.buckets["runs"]
    # As a pod of root leaves a directory.
    project.s3.put_object(Bucket=bucket, Key="exports/", Metadata={"mode": str(stat.S_IFDIR | 0o755), "uid": "0"})
    for form, name in (("tar", "digits.tar"), ("oci", "layout")):
        to = {"datastore": "runs", "path": f"exports/{name}"}
        spec = {"model": "digits", "version": number, "to": to, "format": form}
        made = {"apiVersion": "datastore.dev/v1alpha1", "kind": "ModelExport", "metadata": {"name": f"as-{form}"}}
        project.kube.apply({**made, "spec": spec}, namespace=project.name)
    for form in ("tar", "oci"):
        project.kube.wait_condition("mx", f"as-{form}", "Complete", namespace=project.name, limit_s=LIMIT_S)
    with opened_storage(project.source()) as storage:
        models = Models(storage)
        export_tar_file(models, "digits", number, tmp_path / "digits.tar", Progress())
        export_layout(models, "digits", number, tmp_path / "layout", Progress())
    listed = project.s3.list_objects_v2(Bucket=bucket, Prefix="exports/")["Contents"]
    found = {
        key.removeprefix("exports/"): project.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in (each["Key"] for each in listed)
        if not key.endswith("/")
    }
    expected = {str(each.relative_to(tmp_path)): each for each in tmp_path.rglob("*") if each.is_file()}
    assert sorted(found) == sorted(expected)
    assert not [path for path, file in expected.items() if file.read_bytes() != found[path]]


METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/metrics', timeout=10).read().decode())"


@promise("S-401")
def test_the_rules_of_the_role_are_the_calls_made(project: Project) -> None:
    """The tests above have made every kind of call, with these rights and no others."""
    # The role datastore-training-models is that of another controller.
    allowed = granted(REPOSITORY / "manifests" / "models" / "models.yaml", without="datastore-training-models")
    (pod,) = project.kube.items("pods", namespace=SYSTEM, selector="app.kubernetes.io/component=models")
    text = project.kube.execute(pod["metadata"]["name"], "python3", "-c", METRICS, namespace=SYSTEM)
    pattern = re.compile(r'^datastore_controller_api_requests_total\{resource="([^"]+)",verb="([^"]+)"\}', re.M)
    made = {(found[1], found[2]) for found in pattern.finditer(text)}
    watched = {"modelversions", "modelexports", "models", "servings", "datastores", "jobs", "leases"}
    made |= {(each, verb) for each in watched for verb in ("list", "watch")}
    # Server-side apply of something new is authorised as create, too; logs are not counted.
    made |= {(each, "create") for each in ("persistentvolumes", "persistentvolumeclaims")} | {("pods/log", "get")}
    assert sorted(made - allowed) == []
    first_use = {("datastores", "create"), ("storageclasses", "list")}  # of a namespace without a store
    assert sorted(allowed - made - first_use) == []
