"""A Datastore of a cluster, link by link: definition, controller, object, Secret, backend, claim, driver, pods.

Each link rests on those before it, so the walk ends at the first broken one, and then shows the last errors that the
cluster recorded. Reads only, and of a Secret only the names of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from datastore.api.datastore import GROUP
from datastore.api.secretmanifest import ACCESS_KEY_NAMES, SECRET_KEY_NAMES
from datastore.api.volumecontext import DRIVER
from datastore.cli.findings import Finding, Level, bad, ok, warn
from datastore.cli.kubectl import EVERYWHERE

DATASTORES = f"datastores.{GROUP}"
COMPONENT = "app.kubernetes.io/name=datastore,app.kubernetes.io/component="
EVENTS_SHOWN = 3


class Cluster(Protocol):
    """What is asked of the cluster; datastore.cli.kubectl.Kubectl."""

    def get(self, kind: str, name: str = "", *, selector: str = "", namespace: str | None = None) -> Any:
        """An object or None; without a name a list."""
        ...


class _Walk:
    """One Datastore; each link is a method, and keeps what later ones need."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._body: Any = {}
        self._claim: Any = {}

    def links(self) -> tuple[Callable[[], Iterator[Finding]], ...]:
        return (
            self.definition,
            self.controller,
            self.object,
            self.secret,
            self.backend,
            self.claim,
            self.driver,
            self.pods,
        )

    def definition(self) -> Iterator[Finding]:
        if self._cluster.get("customresourcedefinitions", DATASTORES) is None:
            yield bad("cluster", f"{DATASTORES} is not defined", "kubectl apply -k manifests/")
            return
        yield ok("cluster", "the API server answers, and Datastores are defined")

    def controller(self) -> Iterator[Finding]:
        yield from self._component("controller", "deployment/datastore-controller")

    def object(self) -> Iterator[Finding]:
        self._body = self._cluster.get(DATASTORES, self._name)
        if self._body is None:
            yield bad("object", f"there is no Datastore {self._name} in this namespace", "kubectl get datastores -A")
            return
        metadata, status = self._body["metadata"], self._body.get("status") or {}
        if "deletionTimestamp" in metadata:
            why = _condition(self._body, "Ready").get("message", "the controller has not begun")
            todo = f"wait, or: kubectl datastore release {self._name}"
            yield bad("object", f"Datastore {self._name} is being deleted: {why}", todo)
        elif status.get("observedGeneration") != metadata.get("generation"):
            yield bad("object", "the controller has not acted on the present spec", "look at the controller's log")
        else:
            yield ok("object", f"Datastore {self._name} is at {status.get('location', '?')}, seen by the controller")

    def secret(self) -> Iterator[Finding]:
        name = (self._body["spec"].get("s3") or {}).get("credentialsSecret")
        if not name:
            yield ok("secret", "none is named: the StorageClass or the cluster's identity has the keys")
            return
        found = self._cluster.get("secrets", name)
        if found is None:
            yield bad("secret", f"there is no Secret {name} in the Datastore's namespace", "create it")
            return
        keys = set(found.get("data") or {})
        missing = [each[0] for each in (ACCESS_KEY_NAMES, SECRET_KEY_NAMES) if not keys & set(each)]
        if missing:
            yield bad("secret", f"Secret {name} has no {' and no '.join(missing)}", "add it")
        else:
            yield ok("secret", f"Secret {name} has an access key and a secret key")

    def backend(self) -> Iterator[Finding]:
        ready, provisioned = _condition(self._body, "Ready"), _condition(self._body, "Provisioned")
        if ready.get("status") == "True" or ready.get("reason") == provisioned.get("reason"):
            yield ok("backend", f"{self._body['status'].get('backend', '?')} answers as it should")
            return
        yield bad("backend", f"{ready.get('reason', 'Unknown')}: {ready.get('message', '')}", "correct what it names")

    def claim(self) -> Iterator[Finding]:
        name = self._body["status"].get("claimName", self._name)
        self._claim = self._cluster.get("persistentvolumeclaims", name)
        if self._claim is None:
            yield bad(
                "claim",
                f"there is no PersistentVolumeClaim {name}",
                _condition(self._body, "Provisioned").get("message", ""),
            )
            return
        phase = self._claim.get("status", {}).get("phase")
        if phase != "Bound":
            yield bad("claim", f"PersistentVolumeClaim {name} is {phase}", f"kubectl describe pvc {name}")
            return
        yield ok("claim", f"PersistentVolumeClaim {name} is bound to {self._claim['spec'].get('volumeName')}")

    def driver(self) -> Iterator[Finding]:
        if not self._body["status"].get("volumeName"):
            yield ok("driver", "the claim's own driver mounts it")
            return
        if self._cluster.get("csidrivers", DRIVER) is None:
            yield bad("driver", f"CSIDriver {DRIVER} is missing", "kubectl apply -k manifests/")
            return
        yield from self._component("keeper", "daemonset/datastore-keeper")
        yield from self._component("node", "daemonset/datastore-node")

    def pods(self) -> Iterator[Finding]:
        name = self._claim["metadata"]["name"]
        users = [pod for pod in self._cluster.get("pods") if name in _claims(pod)]
        waiting = [pod for pod in users if pod.get("status", {}).get("phase") == "Pending"]
        if not users:
            yield ok("pods", "no pod uses it now")
        for pod in waiting:
            where = pod["spec"].get("nodeName")
            yield warn(
                "pods",
                f"pod {pod['metadata']['name']} waits" + (f" on node {where}" if where else " for a node"),
                f"kubectl describe pod {pod['metadata']['name']}",
            )
        if users and not waiting:
            yield ok("pods", f"used by {', '.join(pod['metadata']['name'] for pod in users[:5])}")

    def last_errors(self) -> Iterator[Finding]:
        """The newest warnings about the Datastore, its claim and its pods."""
        users = {pod["metadata"]["name"] for pod in self._cluster.get("pods") if self._name in _claims(pod)}
        told = [
            event
            for event in self._cluster.get("events")
            if event.get("type") == "Warning" and event.get("involvedObject", {}).get("name") in {self._name, *users}
        ]
        for event in sorted(told, key=lambda each: str(each.get("lastTimestamp")))[-EVENTS_SHOWN:]:
            about = event["involvedObject"]
            text = f"{about.get('kind')} {about.get('name')}: {event.get('reason')}: {event.get('message')}"
            yield warn("last errors", f"{event.get('lastTimestamp')} {text}", "")

    def _component(self, name: str, what: str) -> Iterator[Finding]:
        # In whatever namespace it was installed.
        pods = self._everywhere(f"{COMPONENT}{name}")
        unready = [pod for pod in pods if not _pod_ready(pod)]
        # Of the controller's replicas one works; of the others each serves its own node.
        broken = unready if name != "controller" or len(unready) == len(pods) else []
        if not pods:
            yield bad(name, f"no pod of {what} runs", "kubectl apply -k manifests/; kubectl describe the workload")
        elif broken:
            shown = ", ".join(
                f"{pod['metadata']['name']} on {pod['spec'].get('nodeName', 'no node')}" for pod in broken[:3]
            )
            yield bad(name, f"not ready: {shown}", "kubectl logs and kubectl describe these pods")
        else:
            yield ok(name, f"{len(pods)} of {len(pods)} pods are ready" if not unready else "one of its pods is ready")

    def _everywhere(self, selector: str) -> list[Any]:
        return list(self._cluster.get("pods", selector=selector, namespace=EVERYWHERE))


def cluster_checks(cluster: Cluster, name: str) -> Iterator[Finding]:
    """Walk the links of a Datastore up to the first broken one, then the last errors."""
    walk = _Walk(cluster, name)
    for link in walk.links():
        broken = False
        for finding in link():
            broken = broken or finding.level is Level.FAIL
            yield finding
            if broken:
                yield from walk.last_errors()
                return
    yield from walk.last_errors()


def _condition(body: Any, kind: str) -> dict[str, str]:
    conditions = (body.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == kind), {})


def _claims(pod: Any) -> set[str]:
    volumes = pod.get("spec", {}).get("volumes") or []
    return {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}


def _pod_ready(pod: Any) -> bool:
    return _condition(pod, "Ready").get("status") == "True"
