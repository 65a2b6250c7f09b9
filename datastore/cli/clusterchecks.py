"""Checks of a Datastore in a cluster: definition, controller, object, Secret, backend, claim, driver, mounts, pods.

Each check rests on those before it, so the first failure ends them; the last errors that the cluster recorded follow.
What the user has no right to read is reported and skipped. Nothing is written; of a Secret only key names are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from datastore.api.objects import claims_of, condition
from datastore.api.reasons import REASONS
from datastore.api.resources import (
    CLAIMS,
    DATASTORES,
    DEFINITIONS,
    DRIVERS,
    EVENTS,
    PODS,
    SECRETS,
)
from datastore.api.secretmanifest import ACCESS_KEY_NAMES, SECRET_KEY_NAMES
from datastore.api.volumecontext import DRIVER, VolumeHandle
from datastore.cli import workloadchecks
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.findings import Finding, Level, bad, ok, warn
from datastore.cli.workloadchecks import Cluster
from datastore.errors import AccessDenied
from datastore.kubeclient import EVERYWHERE

DEFINITION = "datastores.datastore.dev"
EVENTS_SHOWN = 3
MOUNT_FAILURES = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")


class _Walk:
    """The checks of one Datastore, called links. Each is a method and may keep what later links need."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._body: Any = {}

    def links(self) -> tuple[Callable[[], Iterator[Finding]], ...]:
        return (
            self.definition,
            self.controller,
            self.object,
            self.secret,
            self.backend,
            self.claim,
            self.driver,
            self.mounts,
            self.pods,
        )

    def definition(self) -> Iterator[Finding]:
        if self._cluster.get(DEFINITIONS, DEFINITION) is None:
            yield bad("cluster", f"{DEFINITION} is not defined", "kubectl apply -k manifests/")
            return
        yield ok("cluster", "the API server answers, and Datastores are defined")

    def controller(self) -> Iterator[Finding]:
        yield workloadchecks.controller(self._cluster, workloadchecks.pods_of(self._cluster, "controller"))

    def object(self) -> Iterator[Finding]:
        self._body = self._cluster.get(DATASTORES, self._name)
        if self._body is None:
            yield self._elsewhere()
            return
        metadata, status = self._body["metadata"], self._body.get("status") or {}
        if "deletionTimestamp" in metadata:
            why = condition(self._body, "Ready").get("message", "the controller has not begun")
            todo = f"wait, or: kubectl datastore remove-finalizer {self._name}"
            yield bad("object", f"Datastore {self._name} is being deleted: {why}", todo)
        elif status.get("observedGeneration") != metadata.get("generation"):
            todo = "the controller's log; and does it serve this namespace (its NAMESPACES)?"
            yield bad("object", "the controller has not acted on the present spec", todo)
        else:
            yield ok("object", f"Datastore {self._name} is at {status.get('location', '?')}, seen by the controller")

    def secret(self) -> Iterator[Finding]:
        name = (self._body["spec"].get("s3") or {}).get("credentialsSecret")
        if not name:
            yield ok("secret", "none is named: the StorageClass or the cluster's identity has the keys")
            return
        found = self._cluster.get(SECRETS, name)
        if found is None:
            yield bad("secret", f"there is no Secret {name} in the Datastore's namespace", "create it", ExitCode.USAGE)
            return
        keys = set(found.get("data") or {})
        missing = [each[0] for each in (ACCESS_KEY_NAMES, SECRET_KEY_NAMES) if not keys & set(each)]
        if missing:
            yield bad("secret", f"Secret {name} has no {' and no '.join(missing)}", "add it", ExitCode.USAGE)
        else:
            yield ok("secret", f"Secret {name} has an access key and a secret key")

    def backend(self) -> Iterator[Finding]:
        ready, provisioned = condition(self._body, "Ready"), condition(self._body, "Provisioned")
        if ready.get("status") == "True" or ready.get("reason") == provisioned.get("reason"):
            yield ok("backend", f"{self._body['status'].get('backend', '?')} answers as it should")
            return
        reason = ready.get("reason", "Unknown")
        yield bad("backend", f"{reason}: {ready.get('message', '')}", "correct what it names", _code_of(reason))

    def claim(self) -> Iterator[Finding]:
        name = self._claim_name()
        found = self._cluster.get(CLAIMS, name)
        provisioned = condition(self._body, "Provisioned")
        if found is None:
            yield bad("claim", f"there is no PersistentVolumeClaim {name}", provisioned.get("message", ""))
            return
        phase = found.get("status", {}).get("phase")
        if phase == "Bound":
            yield ok("claim", f"PersistentVolumeClaim {name} is bound to {found['spec'].get('volumeName')}")
            return
        warned = self._warned("PersistentVolumeClaim", {name})
        if provisioned.get("reason") == "WaitingForFirstPod" and not warned:
            yield ok("claim", f"PersistentVolumeClaim {name} waits for its first pod, as its StorageClass may want it")
            return
        why = f": {_said(warned[-1])}" if warned else ""
        yield bad("claim", f"PersistentVolumeClaim {name} is {phase}{why}", f"kubectl describe pvc {name}")

    def driver(self) -> Iterator[Finding]:
        if not self._ours():
            yield ok("driver", "the claim's own driver mounts it")
            return
        if self._cluster.get(DRIVERS, DRIVER) is None:
            yield bad("driver", f"CSIDriver {DRIVER} is missing", "kubectl apply -k manifests/")

    def mounts(self) -> Iterator[Finding]:
        """Check the mount daemon, the node plugin and the mount on the nodes of the pods that use the Datastore."""
        if not self._ours():
            return
        users = self._users()
        nodes = {workloadchecks.node_of(pod) for pod in users} - {""}
        of = {each: workloadchecks.pods_of(self._cluster, each) for each in ("mount-daemon", "node")}
        for component, pods in of.items():
            yield from workloadchecks.on_nodes(self._cluster, component, pods, nodes)
        metadata = self._body["metadata"]
        handle = VolumeHandle(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
        for node in sorted({workloadchecks.node_of(pod) for pod in users if _phase(pod) == "Running"}):
            yield from workloadchecks.mount(self._cluster, str(handle), node, of["mount-daemon"], of["node"])

    def pods(self) -> Iterator[Finding]:
        users = self._users()
        waiting = [pod for pod in users if _phase(pod) == "Pending"]
        if not users:
            yield ok("pods", "no pod uses it now")
        for pod in waiting:
            name, where = pod["metadata"]["name"], workloadchecks.node_of(pod)
            told = self._warned("Pod", {name})
            text = f"pod {name} waits {f'on {where}' if where else 'for a node'}"
            text += f": {_said(told[-1])}" if told else ""
            broken = bool(told) and told[-1].get("reason") in MOUNT_FAILURES
            yield (bad if broken else warn)("pods", text, f"kubectl describe pod {name}")
        if users and not waiting:
            yield ok("pods", f"used by {', '.join(pod['metadata']['name'] for pod in users[:5])}")

    def last_errors(self) -> Iterator[Finding]:
        """Report the newest warning events about the Datastore, its claim and its pods."""
        names = {"Datastore": {self._name}, "PersistentVolumeClaim": {self._claim_name()}}
        names["Pod"] = {pod["metadata"]["name"] for pod in self._users()}
        told = [event for kind, named in names.items() for event in self._warned(kind, named)]
        # Keep only the newest event for an object and a reason: two conditions may fail for the same reason.
        newest = {(each["involvedObject"]["name"], each.get("reason")): each for each in told}
        for event in sorted(newest.values(), key=_when)[-EVENTS_SHOWN:]:
            about = event["involvedObject"]
            yield warn("last errors", f"{_when(event)} {about.get('kind')} {about.get('name')}: {_said(event)}", "")

    def _elsewhere(self) -> Finding:
        """Return the finding that this namespace has no such Datastore, and which other namespaces have one."""
        text = f"there is no Datastore {self._name} in namespace {self._cluster.namespace}"
        try:
            found = self._cluster.list(DATASTORES, namespace=EVERYWHERE)
        except AccessDenied:
            found = []
        where = [each["metadata"]["namespace"] for each in found if each["metadata"]["name"] == self._name]
        if where:
            return bad("object", f"{text}, but in {', '.join(where[:5])}", f"add -n {where[0]}", ExitCode.USAGE)
        return bad("object", text, "add -n and its namespace: kubectl get datastores -A shows all", ExitCode.USAGE)

    def _ours(self) -> bool:
        status = self._body.get("status") or {}
        return bool(status.get("volumeName")) and status.get("backend") not in ("claim", "local")

    def _claim_name(self) -> str:
        return str((self._body.get("status") or {}).get("claimName", self._name)) if self._body else self._name

    def _users(self) -> list[Any]:
        """Return the pods that mount the Datastore's claim and have not ended."""
        name = self._claim_name()
        return [pod for pod in self._cluster.list(PODS) if name in claims_of(pod)]

    def _warned(self, kind: str, names: set[str]) -> list[Any]:
        """Return the warning events about the named objects of a kind, the newest last."""
        about = [each for each in self._cluster.list(EVENTS) if each.get("type") == "Warning"]
        about = [each for each in about if each.get("involvedObject", {}).get("kind") == kind]
        return sorted((each for each in about if each["involvedObject"].get("name") in names), key=_when)


def cluster_checks(cluster: Cluster, name: str) -> Iterator[Finding]:
    """Check the links of a Datastore up to the first broken one, then report the last errors."""
    walk = _Walk(cluster, name)
    for link in walk.links():
        broken = False
        try:
            for finding in link():
                yield finding
                broken = finding.level is Level.FAIL
                if broken:
                    break
        except AccessDenied as error:
            # The links that follow need the object.
            broken = link == walk.object
            yield (bad if broken else warn)(link.__name__, f"could not look: {error}", "ask an administrator to look")
        if broken:
            break
    try:
        yield from walk.last_errors()
    except AccessDenied as error:
        yield warn("last errors", f"could not look: {error}", "")


def _code_of(reason: str) -> ExitCode:
    """Return the exit code that `mount` has for the errors with this reason."""
    kinds = [kind for kind, named in REASONS.items() if named == reason]
    return exit_code_for(kinds[0]("")) if kinds else ExitCode.ERROR


def _phase(pod: Any) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _when(event: Any) -> str:
    """Return the event's time as RFC 3339 text. The scheduler's events have no lastTimestamp."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _said(event: Any) -> str:
    return f"{event.get('reason')}: {event.get('message')}"
