"""The controller as a process of this machine, with the rights of its service account and no more."""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from datastore.api.names import volume_name
from datastore.api.volumecontext import DRIVER
from tests.cluster import cluster as clusters
from tests.cluster.cluster import Cluster
from tests.cluster.kube import Kube, Manifest
from tests.servers import Server, boto_client, make_bucket, run_versitygw

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "datastore-system"
READY_S = 120.0
"""It takes a second or two; this only ends the wait for what never comes."""
ACCOUNT = "datastore-controller"
START_S = 180.0
STOP_S = 60.0
ANSWER_S = 60.0
PAGE_S = 1.1
"""A page of metrics is shown again for a second."""


@dataclass(frozen=True, slots=True)
class Controller:
    """A running controller. log: what it wrote."""

    port: int
    log: Path
    pid: int

    def status(self, path: str) -> int:
        """HTTP status of an endpoint; 0 when nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    def works(self) -> bool:
        """Whether this replica leads."""
        return "datastore_controller_active 1.0" in self.metrics()

    def changes(self) -> float:
        """How many requests it made that change something, but for those about its Lease."""
        time.sleep(PAGE_S)
        found = re.findall(r'_requests_total\{resource="([^"]+)",verb="([^"]+)"\} (\S+)', self.metrics())
        return sum(float(n) for kind, verb, n in found if kind != "leases" and verb not in ("get", "list", "watch"))

    def calls(self) -> set[tuple[str, str]]:
        """(resource, verb) of every request made to the API server but watches."""
        time.sleep(PAGE_S)
        pattern = re.compile(r'^datastore_controller_api_requests_total\{resource="([^"]+)",verb="([^"]+)"\}', re.M)
        return {(found[1], found[2]) for found in pattern.finditer(self.metrics())}

    def peak_mib(self) -> float:
        """Most memory it ever had."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024


def account_kubeconfig(admin: Path, kube: Kube, folder: Path, account: str = ACCOUNT, pod: str = "") -> Path:
    """A kubeconfig with the token of a service account, the controller's unless said. pod: the token is one that the
    kubelet gives to this pod, and names its node."""
    bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod}"] if pod else ["--duration", "2h"]
    token = kube.kubectl("create", "token", account, "--namespace", SYSTEM, *bound).strip()
    document = yaml.safe_load(admin.read_text())
    document["users"] = [{"name": user["name"], "user": {"token": token}} for user in document["users"]]
    path = folder / f"{account}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


def answer(kubeconfig: Path, method: str, path: str, body: Any, content_type: str) -> tuple[int, str]:
    """HTTP status and message of one request with this identity: kubectl would look first, which is another right."""
    document = yaml.safe_load(kubeconfig.read_text())
    server, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    given = server.get("certificate-authority-data")
    context = ssl.create_default_context(
        cafile=server.get("certificate-authority"), cadata=base64.b64decode(given).decode() if given else None
    )
    headers = {"Authorization": f"Bearer {user['token']}", "Content-Type": content_type}
    request = urllib.request.Request(server["server"] + path, json.dumps(body).encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S, context=context) as found:
            return int(found.status), ""
    except urllib.error.HTTPError as error:
        return error.code, str(json.loads(error.read()).get("message", ""))


@contextmanager
def controller(
    kubeconfig: Path, folder: Path, *arguments: str, name: str = "c-1", ready: bool = True, training: bool = False
) -> Iterator[Controller]:
    """Run it for the time of the block, ready at its beginning unless said; it must end by itself when told to.

    training: that of TrainingJobs.
    """
    log = folder / f"{name}.log"
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "POD_NAMESPACE": SYSTEM,
        "POD_NAME": name,
        "ALLOW_RANGES": "127.0.0.0/8",  # where the tests' S3 servers are
        "SAVE_MODELS": "true",
    }
    module = ["datastore.controller.trainingjobs"] if training else ["datastore.controller", "--watch-secrets"]
    command = [sys.executable, "-m", *module, "--port", "0", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        until = time.monotonic() + START_S
        while (running := _serving(log, process.pid, ready=ready)) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _serving(log: Path, pid: int, *, ready: bool) -> Controller | None:
    """The controller when it serves on the port that its log names, and is ready where that is asked."""
    found = re.search(r" serving port=(\d+) ", log.read_text())
    if found is None:
        return None
    running = Controller(int(found[1]), log, pid)
    answers = running.status("/readyz") == 200 if ready else running.status("/livez") != 0
    return running if answers else None


def secret_of(server: Server, name: str = "keys", **other: str) -> Manifest:
    keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key, **other}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": keys}


def datastore_of(name: str, spec: Mapping[str, Any]) -> Manifest:
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": name}, "spec": dict(spec)}


def pod_on_no_node(name: str, claim: str) -> Manifest:
    """A pod that uses a claim. Nothing runs it here, but it is on a node and has not ended: that is use."""
    container = {"name": "main", "image": "none", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    spec = {
        "containers": [container],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}],
        "nodeName": "absent",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def inline_on_no_node(name: str, datastore: str) -> Manifest:
    """A pod that uses a Datastore by an inline volume, as pod_on_no_node() does a claim."""
    pod = pod_on_no_node(name, "")
    attributes = {"volumeAttributes": {"datastore": datastore}, "nodePublishSecretRef": {"name": "keys"}}
    pod["spec"]["volumes"] = [{"name": "v", "csi": {"driver": DRIVER, **attributes}}]
    return pod


def granted(path: Path, *, without: str = "") -> set[tuple[str, str]]:
    """Return the (resource, verb) pairs that the roles of a file grant. without: a role that is left out."""
    documents = [each for each in yaml.safe_load_all(path.read_text()) if each["metadata"]["name"] != without]
    rules = [rule for document in documents for rule in document.get("rules", [])]
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def condition(body: Manifest | None, kind: str) -> Mapping[str, str]:
    """One condition, or nothing."""
    conditions = ((body or {}).get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})


@pytest.fixture
def fresh(nothing_stays_behind: None) -> Iterator[Kube]:
    """A cluster without a node, and nothing in it."""
    if reason := clusters.obstacle(api_only=True):
        pytest.fail(reason)
    cluster = clusters.up(f"api-{uuid.uuid4().hex[:8]}", api_only=True, owned=True)
    try:
        yield Kube(cluster.kubeconfig, also=(SYSTEM,))
    finally:
        cluster.end()


@pytest.fixture(scope="session")
def api_kube(api_server: Cluster) -> Kube:
    kube = Kube(api_server.kubeconfig, also=(SYSTEM,))
    kube.apply_folder(ROOT / "manifests")
    return kube


@pytest.fixture(scope="session")
def account(api_server: Cluster, api_kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return account_kubeconfig(api_server.kubeconfig, api_kube, tmp_path_factory.mktemp("account"))


@pytest.fixture(scope="session")
def running(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with controller(account, tmp_path_factory.mktemp("controller"), "--check", "5s") as found:
        yield found


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    with run_versitygw() as found:
        yield found


@pytest.fixture(scope="session")
def ending_spaces(api_kube: Kube, running: Controller) -> Iterator[list[str]]:
    """Namespaces whose deletion was asked for; none may hang. The controller still runs while they go."""
    names: list[str] = []
    yield names

    def gone() -> bool:
        return not {each["metadata"]["name"] for each in api_kube.items("namespaces")} & set(names)

    api_kube.wait_for("end of the namespaces", gone, limit_s=300, namespace=names[-1] if names else SYSTEM)


@pytest.fixture
def space(api_kube: Kube, s3_server: Server, ending_spaces: list[str]) -> Iterator[str]:
    """A namespace with the right Secret `keys`."""
    name = f"team-{uuid.uuid4().hex[:6]}"
    api_kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    api_kube.apply(secret_of(s3_server), namespace=name)
    yield name
    api_kube.delete("namespace", name, wait=False)
    ending_spaces.append(name)


class Bench:
    """What most tests do: make a Datastore on a bucket of its own, and look."""

    def __init__(self, kube: Kube, server: Server, space: str) -> None:
        self.kube, self.server, self.space = kube, server, space
        self.s3 = boto_client(server)
        self.bucket = f"b-{uuid.uuid4().hex[:8]}"
        make_bucket(server, self.bucket)

    def spec(self, prefix: str = "", **more: Any) -> dict[str, Any]:
        s3 = {"bucket": self.bucket, "endpoint": self.server.endpoint, "credentialsSecret": "keys"}
        s3 |= {"prefix": prefix} if prefix else {}
        return {"s3": s3 | more.pop("s3", {}), **more}

    def apply(self, name: str, spec: dict[str, Any]) -> None:
        self.kube.apply(datastore_of(name, spec), namespace=self.space)

    def get(self, name: str) -> Manifest | None:
        return self.kube.get("datastore", name, namespace=self.space)

    def volume(self, name: str) -> Manifest | None:
        found = self.get(name)
        return self.kube.get("pv", volume_name(found["metadata"]["uid"])) if found else None

    def ready(self, name: str) -> float:
        return self.kube.wait_condition("datastore", name, "Ready", namespace=self.space, limit_s=READY_S)

    def reason(self, name: str, reason: str) -> str:
        """Wait for Ready=False with this reason; its message."""

        found: Mapping[str, str] = {}

        def told() -> bool:
            nonlocal found
            found = condition(self.get(name), "Ready")
            return found.get("status") == "False" and found.get("reason") == reason

        self.kube.wait_for(f"reason {reason} of {name}", told, limit_s=READY_S, namespace=self.space)
        return found["message"]

    def gone(self, name: str) -> None:
        self.kube.wait_for(f"end of {name}", lambda: self.get(name) is None, limit_s=READY_S, namespace=self.space)

    def use(self, pod: str, claim: str, *, inline: bool = False) -> None:
        """Make a pod of this name that uses the claim, or the Datastore of that name inline."""
        account = "service account"
        self.kube.wait_for(account, lambda: bool(self.kube.get("serviceaccount", "default", namespace=self.space)))
        made = inline_on_no_node(pod, claim) if inline else pod_on_no_node(pod, claim)
        self.kube.apply(made, namespace=self.space)

    def objects(self) -> list[str]:
        return [each["Key"] for each in self.s3.list_objects_v2(Bucket=self.bucket).get("Contents", [])]


@pytest.fixture
def bench(api_kube: Kube, s3_server: Server, space: str, running: Controller) -> Bench:
    return Bench(api_kube, s3_server, space)
