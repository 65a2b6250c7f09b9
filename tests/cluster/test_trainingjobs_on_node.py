"""TrainingJobs by the command on a cluster with a kubelet: the file of a laptop, with real TensorFlow in its pods.

The pods run the project's image, for its Python; TensorFlow comes from this machine's environment by a hostPath volume,
which the controller has to be told to allow.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from datastore.controller.trainingjobs.__main__ import NAME as CONTROLLER
from datastore.controller.trainingjobs.desired import GRACE_S
from datastore.training.cluster import names
from tests.cluster.controlled import condition
from tests.cluster.fixtures import ROLLOUT_S, SYSTEM, Product, Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.promises import promise
from tests.servers import boto_client, make_bucket, tools_dir
from tests.training.laptop import EXAMPLES, put_digits

pytestmark = [pytest.mark.e2e_training_cluster, pytest.mark.own_node, pytest.mark.timeout(2000, func_only=True)]
RUN_S = 600.0
SOON_S = 300.0
FREED_S = 120.0
"""How soon the node has ended what is freed, beside the grace that it gives; a busy one takes its time."""
GPU = "example.com/gpu"
"""A device that the test's node says it has."""
FRAMEWORKS = sysconfig.get_paths()["purelib"]
PROGRAMS = {
    "jax": ("train.py", "job.yaml"),
    "pytorch": ("train.py", "job.yaml"),
    "mpi": ("hello.py", "job.yaml"),
    "tensorflow": ("train.py", "mirrored.yaml"),
}
# Debian's torch 1.13 with Python 3.11 needs the last two.
TORCHRUN = ["-m", "torch.distributed.run", "--redirects", "1", "--tee", "1"]

PROGRAM = """
import os, pathlib, socket, sys, time
def write_events_until(go, index):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    writer = EventFileWriter("/out/board/worker-" + index, flush_secs=1)
    step = 0
    while not go.exists():
        step += 1
        value = Summary.Value(tag="loss", simple_value=1.0 / step)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
        writer.flush()
        time.sleep(0.5)
    writer.close()
    (pathlib.Path("/out") / "model").mkdir(exist_ok=True)
    (pathlib.Path("/out") / "model" / index).write_text("weights")
def connected(host):
    until = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection((host, 2222), timeout=60)
        except OSError:  # a busy cluster may be slow to tell an address
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
job, role, index = (os.environ["DATASTORE_" + name] for name in ("JOB", "ROLE", "INDEX"))
print(role, index, "of", job, "rank", os.environ["DATASTORE_RANK"], flush=True)
if role == "master":
    if sys.argv[1:] == ["fail"]:
        while not (pathlib.Path("/out") / os.environ["GO"]).exists():
            time.sleep(0.2)
        sys.exit("the chief gives up")
    with socket.create_server(("", 2222)) as listening:
        done = set()
        while len(done) < 2:
            with listening.accept()[0] as connection:
                done.add(connection.recv(100))
    print("all done:", sorted(done), flush=True)
elif role == "worker" and sys.argv[1:] != ["fail"]:
    place = pathlib.Path("/out") / f"worker-{index}"
    place.mkdir(exist_ok=True)
    # What was being written by who was killed is not whole.
    step = max((int(each.name) for each in place.iterdir() if each.read_text() == each.name), default=0)
    print("begins at step", step, flush=True)
    while step < 20:
        step += 1
        (place / str(step)).write_text(str(step))
        time.sleep(0.5)
    if "GO" in os.environ:
        write_events_until(pathlib.Path("/out") / os.environ["GO"], index)
    with connected(f"{job}-master-0.train-{job}") as connection:
        connection.send(index.encode())
else:
    held = b"x" * (200 << 20)
    while True:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        time.sleep(0.4)
"""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with a kubeconfig and a file."""

    kube: Kube
    namespace: str
    folder: Path
    storage: Storage
    bucket: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A verb of `datastore job` in the cluster."""
        return subprocess.run(
            [sys.executable, "-m", "datastore.cli", "job", *arguments],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            cwd=self.folder,
            env={**os.environ, "KUBECONFIG": str(self.kube.kubeconfig)},
            check=False,
        )

    def said(self, *arguments: str) -> str:
        """What a verb printed; it must succeed."""
        done = self.run(*arguments, "--namespace", self.namespace)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *documents: Manifest) -> None:
        """A file with these; it says its namespace."""
        done = self.run("submit", "-f", self.file("job.yaml", list(documents)))
        assert done.returncode == 0, done.stdout + done.stderr

    def top(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.said("top", name, "--once", "-o", "json"))
        return rows

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.said("get", name, "-o", "json"))
        return found

    def whole_log(self, job: str, replica: str) -> str:
        """What spec.logs has written of a replica, into the directory `logs` of digits-out; '' while nothing."""
        client, key = boto_client(self.storage.here), f"digits-out/logs/{job}/{replica}.log"
        try:
            return str(client.get_object(Bucket=self.bucket, Key=key)["Body"].read(), "utf-8")
        except client.exceptions.NoSuchKey:
            return ""

    @contextmanager
    def tensorboard(self, name: str) -> Iterator[Callable[[str], int]]:
        """`datastore job tensorboard`, until Ctrl-C: how many steps of a run it shows."""
        command, said = ["tensorboard", name, "--namespace", self.namespace, "--port", "0"], self.folder / "said.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "datastore.cli", "job", *command],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "KUBECONFIG": str(self.kube.kubeconfig),
                    "PATH": f"{tools_dir()}{os.pathsep}{os.environ['PATH']}",
                },
            )

        def steps(run: str) -> int:
            assert process.poll() is None, said.read_text()
            forwarded = re.search(r"127\.0\.0\.1:(\d+) ->", said.read_text())
            if forwarded is None:
                return 0
            with contextlib.suppress(OSError, http.client.HTTPException):
                asked = f"http://127.0.0.1:{forwarded[1]}/data/plugin/scalars/scalars?tag=loss&run={run}"
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    return len(json.loads(answer.read()))
            return 0

        try:
            yield steps
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SOON_S)

    def pod(self, job: str, role: str, index: int) -> Manifest:
        """The pod of a replica that has had no other."""
        wanted = f"{names.JOB}={job},{names.ROLE}={role},{names.INDEX}={index}"
        (pod,) = self.kube.items("pods", namespace=self.namespace, selector=wanted)
        return pod

    def evict(self, job: str, role: str, index: int) -> None:
        """As a drain of its node does."""
        metadata = {"name": self.pod(job, role, index)["metadata"]["name"], "namespace": self.namespace}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{metadata['name']}/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        self.kube.kubectl("create", "--raw", path, "--filename=-", given=json.dumps(eviction))

    def no_pods(self) -> None:
        """Those that have ended hold nothing, and go a moment later."""
        gone = partial(self.kube.items, "pods", namespace=self.namespace, selector=names.JOB)
        self.kube.wait_for("end of the pods", lambda: not gone(), limit_s=SOON_S, namespace=self.namespace)

    def file(self, name: str, documents: list[Manifest]) -> str:
        for each in documents:
            each["metadata"]["namespace"] = self.namespace
        path = self.folder / name
        path.write_text(yaml.safe_dump_all(documents))
        return str(path)

    def phase(self, name: str, *phases: str, limit_s: float = SOON_S) -> dict[str, Any]:
        def reached() -> bool:
            found = self.kube.get("trainingjob", name, namespace=self.namespace) or {}
            return (found.get("status") or {}).get("phase") in phases

        self.kube.wait_for(f"{name} {phases}", reached, limit_s=limit_s, namespace=self.namespace)
        return self.get(name)

    def data(self) -> list[Manifest]:
        """The Datastores of the examples, with this test's bucket, and their Secret."""
        documents = list(yaml.safe_load_all((EXAMPLES / "tensorflow" / "job.yaml").read_text()))[1:]
        for each in documents:
            if each["kind"] == "Datastore":
                each["spec"]["s3"] |= {"bucket": self.bucket, "endpoint": self.storage.endpoint}
                each["spec"]["s3"]["prefix"] = f"{each['metadata']['name']}/"
            else:
                here = self.storage.here
                each["stringData"] = {
                    "AWS_ACCESS_KEY_ID": here.access_key,
                    "AWS_SECRET_ACCESS_KEY": here.secret_key,
                }
        models = json.loads(json.dumps(next(each for each in documents if each["metadata"]["name"] == "digits-out")))
        models["metadata"]["name"] = "models"
        models["spec"]["s3"]["prefix"] = "models/"
        return [*documents, models]


@pytest.fixture(scope="session")
def allowed(site: Site, product: Product, models_controller: None) -> Kube:
    """The product, with a controller of TrainingJobs that lets users name directories of the node."""
    kube = site.kube
    arguments = {"name": "controller", "args": ["--port=8080", "--allow-overlay=hostPath"]}
    change = {"spec": {"template": {"spec": {"containers": [arguments]}}}}
    kube.kubectl("patch", "deployment", CONTROLLER, f"--namespace={SYSTEM}", f"--patch={json.dumps(change)}")
    kube.kubectl(
        *("rollout", "status", f"deployment/{CONTROLLER}", f"--namespace={SYSTEM}", f"--timeout={ROLLOUT_S:.0f}s"),
        timeout_s=ROLLOUT_S + 30,
    )
    return kube


@pytest.fixture
def person(allowed: Kube, namespace: str, storage: Storage, tmp_path: Path) -> Iterator[Person]:
    bucket = make_bucket(storage.here, f"bucket-{namespace}")
    put_digits(storage.here, bucket, "digits/digits.npz")
    yield Person(allowed, namespace, tmp_path, storage, bucket)
    allowed.kubectl("delete", "trainingjobs", "--all", f"--namespace={namespace}", timeout_s=SOON_S)
    allowed.kubectl("delete", "datastores", "--all", f"--namespace={namespace}", timeout_s=SOON_S)


def programs(person: Person, **files: str) -> Manifest:
    """Programs as a ConfigMap, mounted at /program."""
    person.kube.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "program"}, "data": files},
        namespace=person.namespace,
    )
    return {
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"runAsUser": 0},
        "volumes": [
            {"name": "program", "configMap": {"name": "program"}},
            {"name": "frameworks", "hostPath": {"path": FRAMEWORKS}},
        ],
        "volumeMounts": [
            {"name": "program", "mountPath": "/program"},
            {"name": "frameworks", "mountPath": "/frameworks", "readOnly": True},
        ],
    }


def small(person: Person, site: Site, name: str, *arguments: str, **spec: Any) -> Manifest:
    """A job of a master, two workers and a ps that talk to each other."""
    template = programs(person, **{"small.py": PROGRAM})
    given = {
        "framework": "none",
        "image": site.image,
        "command": ["python3", "/program/small.py", *arguments],
        "roles": {"master": {}, "ps": {"replicas": 1}, "worker": {"replicas": 2}},
        "success": "chief",
        "datastores": [{"name": "digits-out", "path": "/out"}],
        "template": template,
        **spec,
    }
    metadata = {"name": name}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": given}


def process_of(pod: Manifest) -> psutil.Process:
    """The process of a replica, as this machine sees it: others may have jobs of the same name here."""
    role = pod["metadata"]["labels"][names.ROLE]
    for process in psutil.process_iter():
        try:
            mine = pod["metadata"]["uid"] in Path(f"/proc/{process.pid}/cgroup").read_text()
            if mine and process.environ().get("DATASTORE_ROLE") == role:
                return process
        except (psutil.Error, OSError):
            continue
    raise AssertionError(f"no process of {pod['metadata']['name']}")


@promise("S-353")
def test_a_user_who_is_not_root_writes_to_a_new_datastore_where_pod_security_is_restricted(
    person: Person, site: Site
) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    person.kube.kubectl("label", "namespace", person.namespace, level)
    context = {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 2000,
    }
    spec = {
        "image": site.image,
        "command": ["sh", "-c", "id -u; mkdir -p /out/run && echo made > /out/run/x"],
        "datastores": [{"name": "digits-out", "path": "/out"}],
        "template": {"imagePullPolicy": site.pull_policy, "securityContext": context},
    }
    metadata = {"name": "apart"}
    job = {"apiVersion": "datastore.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
    person.submit(job, *person.data())
    found = person.phase("apart", "Succeeded", "Failed")
    said = person.said("logs", "apart")
    assert (found["status"]["phase"], said) == ("Succeeded", "1000\n")
    body = boto_client(person.storage.here).get_object(Bucket=person.bucket, Key="digits-out/run/x")["Body"].read()
    assert body == b"made\n"


@promise("S-347", "S-346")
def test_a_killed_worker_goes_on_from_what_it_saved(person: Person, site: Site) -> None:
    """It finds the master by name, and its logs hold both of its runs; so does one that is evicted.

    S-356: a TensorBoard shows what is being appended, and ends with the job. and one on request shows the same later.
    S-355: what it made is saved. S-357: its whole logs are in a Datastore. S-359: what the ps takes is shown while it
    runs, and stays.
    """
    board = {"datastore": "digits-out", "path": "board"}
    job = small(
        *(person, site, "mnist"),
        env=[{"name": "GO", "value": "go"}, {"name": "PYTHONPATH", "value": "/frameworks"}],
        tensorboard=board,
        logs={"datastore": "digits-out", "path": "logs"},
        save={"model": "digits", "from": "/out/model"},
    )
    person.submit(job, *person.data())
    place = f"{person.bucket}/digits-out/worker-1"

    def half() -> bool:
        return person.said("logs", "mnist", "--role", "worker", "--index", "1").count("begins at step 0") == 1

    person.kube.wait_for(f"{place}", half, limit_s=SOON_S, namespace=person.namespace)
    time.sleep(3)
    process_of(person.pod("mnist", "worker", 1)).send_signal(signal.SIGKILL)
    with person.tensorboard("mnist") as steps:
        person.kube.wait_for("events", lambda: steps("worker-0") >= 2, limit_s=SOON_S, namespace=person.namespace)
        first = steps("worker-0")
        person.kube.wait_for("more", lambda: steps("worker-0") > first, limit_s=SOON_S, namespace=person.namespace)
    assert person.get("mnist")["status"]["phase"] in ("Running", "Restarting")

    def measured() -> bool:
        rows = [each for each in person.top("mnist") if each["role"] == "ps"]
        return bool(rows) and "cpu" in rows[0] and bool(rows[0]["cpu"] > 0 and rows[0]["memory"] > 200 << 20)

    person.kube.wait_for("figures of the ps", measured, limit_s=SOON_S, namespace=person.namespace)
    print("top:", person.top("mnist"))
    person.evict("mnist", "worker", 0)

    def again() -> bool:
        return "begins at step 20" in person.said("logs", "mnist", "--role", "worker", "--index", "0")

    person.kube.wait_for("a new worker-0", again, limit_s=SOON_S, namespace=person.namespace)
    grace_s = person.pod("mnist", "ps", 0)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s == GRACE_S, "the ps, which nothing ends but SIGKILL, has longer than it should"
    boto_client(person.storage.here).put_object(Bucket=person.bucket, Key="digits-out/go", Body=b"")
    found = person.phase("mnist", "Succeeded", "Failed", limit_s=SOON_S)
    assert found["status"]["phase"] == "Succeeded", found
    log = person.said("logs", "mnist", "--role", "worker", "--index", "1")
    assert log.count("begins at step") == 2, log
    assert "begins at step 0" in log
    assert "worker 1 of mnist rank 2" in log
    assert "all done: [b'0', b'1']" in person.said("logs", "mnist", "--role", "master")
    replica = next(each for each in found["evidence"]["replicas"] if (each["role"], each["index"]) == ("worker", 1))
    assert (replica["state"], replica["restarts"]) == ("Succeeded", 1)
    replica = next(each for each in found["evidence"]["replicas"] if each["role"] == "ps")
    print("the ps used", replica["usage"])
    assert 200 << 20 <= replica["usage"]["memory"]["peak"] < 400 << 20
    assert replica["usage"]["cpuSeconds"] >= 1
    assert 0.01 < replica["usage"]["cpu"]["mean"] <= replica["usage"]["cpu"]["peak"] < 1.5
    print(f"from the last step to freed: {found['status']['freedSeconds']:.1f} s")
    assert found["status"]["freedSeconds"] < FREED_S
    person.no_pods()
    said = {
        "worker-1": log.replace("[worker-1] ", ""),
        "master-0": "master 0 of mnist rank 0\nall done: [b'0', b'1']\n",
        "ps-0": "ps 0 of mnist rank 0\n",
    }

    def logged() -> bool:
        return {each: person.whole_log("mnist", each) for each in said} == said

    person.kube.wait_for("the whole logs", logged, limit_s=SOON_S, namespace=person.namespace)

    def saved() -> bool:
        return (
            condition(person.kube.get("trainingjob", "mnist", namespace=person.namespace), "Saved").get("status")
            == "True"
        )

    person.kube.wait_for("the save", saved, limit_s=SOON_S, namespace=person.namespace)
    version = person.kube.get("modelversion", person.get("mnist")["status"]["modelVersion"], namespace=person.namespace)
    assert version is not None
    assert (version["status"]["version"], version["status"]["files"]) == (1, 2)
    assert version["spec"]["origin"]["command"][0] == "python3"
    gone = partial(person.kube.get, "job", "mnist-tensorboard", namespace=person.namespace)
    person.kube.wait_for("end of the TensorBoard", lambda: not gone(), limit_s=SOON_S, namespace=person.namespace)
    with person.tensorboard("mnist") as steps:
        person.kube.wait_for(
            "one on request", lambda: steps("worker-0") >= first, limit_s=SOON_S, namespace=person.namespace
        )
    person.kube.wait_for("its end", lambda: not gone(), limit_s=SOON_S, namespace=person.namespace)


@promise("S-348")
def test_a_chief_that_fails_frees_everything_and_keeps_what_was_said(person: Person, site: Site) -> None:
    """The logs are the same before and afterwards."""
    job = small(person, site, "mnist", "fail", env=[{"name": "GO", "value": "go"}])
    person.submit(job, *person.data())
    person.phase("mnist", "Running", limit_s=SOON_S)

    def begun() -> bool:
        return "0 of mnist" in person.said("logs", "mnist", "--role", "ps")

    person.kube.wait_for("ps", begun, limit_s=SOON_S, namespace=person.namespace)
    before = person.said("logs", "mnist", "--role", "ps")
    boto_client(person.storage.here).put_object(Bucket=person.bucket, Key="digits-out/go", Body=b"")
    found = person.phase("mnist", "Failed")
    assert "master-0 ended with exit code 1; its log says: " in found["status"]["message"]
    assert person.said("logs", "mnist", "--role", "ps") == before == "[ps-0] ps 0 of mnist rank 0\n"
    assert "the chief gives up" in person.said("logs", "mnist", "--role", "master")
    person.no_pods()
    print(f"from the failure to freed: {found['status']['freedSeconds']:.1f} s")
    person.said("delete", "mnist")
    assert person.run("get", "mnist", "--namespace", person.namespace).returncode != 0


@promise("S-345", "S-362")
def test_a_pod_that_cannot_start_is_reported_in_the_kubelets_words(person: Person, site: Site) -> None:
    """Where no node is large enough, it is told in our own words."""
    alone: dict[str, Any] = {"roles": {}}
    (node,) = person.kube.items("nodes", namespace="")
    two = {name: {GPU: "2"} for name in ("capacity", "allocatable")}
    person.kube.patch("node", node["metadata"]["name"], {"status": two}, subresource="status")
    large = small(person, site, "large", **alone, gpus=4, gpusPerTask=4, gpuResource=GPU)
    absent = small(person, site, "absent", **alone) | {}
    absent["spec"]["image"] = "localhost/nosuch:1"
    absent["spec"]["template"]["imagePullPolicy"] = "Never"
    typo = small(person, site, "typo", **alone)
    typo["spec"]["command"] = ["nosuchprogram"]
    person.kube.apply(*person.data(), namespace=person.namespace)
    person.kube.apply(absent, typo, large, namespace=person.namespace)
    found = person.phase("typo", "Failed")
    assert "nosuchprogram" in found["status"]["message"]
    assert found["evidence"]["replicas"][0]["exitCode"] == 127

    def told() -> bool:
        status = person.get("absent").get("status", {})
        return "master-0 waits: ErrImageNeverPull" in status.get("message", "")

    person.kube.wait_for("the reason", told, limit_s=SOON_S, namespace=person.namespace)
    words = f"asks for 4 {GPU}, but the largest node, {node['metadata']['name']}, has 2 {GPU}: lower spec.gpusPerTask"

    def refused() -> bool:
        found = condition(person.kube.get("trainingjob", "large", namespace=person.namespace), "Running")
        return found.get("reason") == "Unschedulable" and words in found.get("message", "")

    person.kube.wait_for("what the largest node has", refused, limit_s=SOON_S, namespace=person.namespace)
    assert words in person.said("get", "large")
    assert person.said("free", "absent").startswith("absent: nothing of it runs any more")
    assert person.phase("absent", "Failed")["status"]["conditions"]


@promise("S-352")
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_the_image_knows_the_time_zones_of_schedules(person: Person, site: Site, zone: str) -> None:
    person.kube.apply(*person.data(), namespace=person.namespace)
    planned = small(person, site, "yearly", roles={}, schedule="0 3 1 1 *", timeZone=zone)
    person.kube.apply(planned, namespace=person.namespace)
    found = person.phase("yearly", "Scheduled", "Failed")
    assert found["status"]["phase"] == "Scheduled", found["status"]["message"]
    assert found["status"]["nextRun"].endswith("-01-01T03:00:00Z" if zone == "UTC" else "-01-01T02:00:00Z")


@promise("S-346", "S-348")
def test_tensorflow_with_a_parameter_server_and_an_evaluator(person: Person, site: Site) -> None:
    """The file of a laptop, but for image, programs and addresses."""
    documents = list(yaml.safe_load_all((EXAMPLES / "tensorflow" / "job.yaml").read_text()))[:1]
    spec = documents[0]["spec"]
    spec["image"] = site.image
    del spec["tensorboard"]
    spec["command"] = ["python3", "/program/train.py"]
    spec["env"] = [{"name": "STEPS", "value": "100"}, {"name": "PYTHONPATH", "value": "/frameworks"}]
    spec["template"] = programs(person, **{"train.py": (EXAMPLES / "tensorflow" / "train.py").read_text()})
    done = person.run("submit", "-f", person.file("job.yaml", [*documents, *person.data()]), "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[master-0] accuracy" in done.stdout
    found = person.get("digits-ps")
    states = {f"{each['role']}{each['index']}": each["state"] for each in found["evidence"]["replicas"]}
    assert states == {
        "master0": "Succeeded",
        "ps0": "Freed",
        "worker0": "Freed",
        "worker1": "Freed",
        "evaluator0": "Succeeded",
    }
    assert "step 100 accuracy" in person.said("logs", "digits-ps", "--role", "evaluator")
    assert found["status"]["freedSeconds"] < FREED_S
    print(f"TensorFlow: freed {found['status']['freedSeconds']:.1f} s after its last step")
    person.no_pods()


@promise("S-346")
def test_jax_torch_mpi_and_mirrored_workers_over_several_pods(person: Person, site: Site) -> None:
    """The files of a laptop, but for image, programs and addresses; torch and mpi4py are this machine's."""
    texts = {each: (EXAMPLES / each / program).read_text() for each, (program, _) in PROGRAMS.items()}
    template = programs(person, **{f"run_{each}.py": text for each, text in texts.items()})
    system = [("usr", "/usr"), ("alternatives", "/etc/alternatives"), ("openmpi", "/etc/openmpi")]
    of_system = {
        **template,
        "volumes": [*template["volumes"], *({"name": name, "hostPath": {"path": path}} for name, path in system)],
        "volumeMounts": [
            *template["volumeMounts"],
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in system),
        ],
    }
    commands = {
        "jax": ["python3", "/program/run_jax.py"],
        "pytorch": ["/usr/bin/python3", *TORCHRUN, "/program/run_pytorch.py"],
        "mpi": ["mpirun", "/usr/bin/python3", "/program/run_mpi.py"],
        "tensorflow": ["python3", "/program/run_tensorflow.py"],
    }
    variables = {
        "jax": {"PYTHONPATH": "/frameworks", "JAX_PLATFORMS": "cpu"},
        "pytorch": {"OMP_NUM_THREADS": "1"},
        "mpi": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        "tensorflow": {"PYTHONPATH": "/frameworks", "STEPS": "100"},
    }
    documents, names = [], {}
    for each, command in commands.items():
        document = next(yaml.safe_load_all((EXAMPLES / each / PROGRAMS[each][1]).read_text()))
        names[each] = document["metadata"]["name"]
        document["spec"] |= {
            "image": site.image,
            "command": command,
            "env": [{"name": name, "value": value} for name, value in variables[each].items()],
            "template": of_system if each in {"pytorch", "mpi"} else template,
        }
        documents.append(document)
    person.kube.apply(*person.data(), *documents, namespace=person.namespace)
    for name in names.values():
        found = person.phase(name, "Succeeded", "Failed", limit_s=RUN_S)
        assert found["status"]["phase"] == "Succeeded", person.said("logs", name)
    logs = {each: person.said("logs", name) for each, name in names.items()}
    assert "process 1 of 2 has 750 pictures, 2 devices in all" in logs["jax"]
    assert "rank 0 of 2" in logs["pytorch"]
    assert "rank 1 of 2" in logs["pytorch"]
    assert logs["mpi"].count("hello from rank") == 3
    assert "right" in logs["mpi"]
    assert logs["tensorflow"].count("step 100 loss") == 2, "both workers take each step"
    assert "accuracy" in logs["tensorflow"]
    made = {each["Key"] for each in boto_client(person.storage.here).list_objects_v2(Bucket=person.bucket)["Contents"]}
    assert {"digits-out/jax.npy", "digits-out/pytorch.pt", "digits-out/mpi.txt"} <= made
    person.no_pods()
