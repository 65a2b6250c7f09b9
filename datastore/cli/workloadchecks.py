"""Checks of the pods that serve Datastores, on all nodes or given ones, and of one volume's mount on a node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from datastore.api.names import PODS_OF
from datastore.api.objects import is_true
from datastore.api.resources import DAEMONSETS, DEPLOYMENTS, PODS, Resource
from datastore.cli.findings import Finding, bad, ok, warn
from datastore.errors import AccessDenied, DatastoreError
from datastore.kubeclient import EVERYWHERE
from datastore.units import format_size

WORKLOADS = {
    "controller": "deployment/datastore-controller",
    "mount-daemon": "daemonset/datastore-mount-daemon",
    "node": "daemonset/datastore-node",
}
SHOWN = 3
_SAMPLE = re.compile(r'^(\w+)\{volume="([^"]*)"\} (\S+)$', re.MULTILINE)


class Cluster(Protocol):
    """What the checks need of a client of the cluster, such as datastore.kubeclient.KubeClient."""

    namespace: str
    """Used by calls that name none."""

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Any:
        """Return the object, or None if there is none."""
        ...

    def list(self, resource: Resource, *, namespace: str | None = None, selector: str = "") -> list[Any]:
        """Return all objects, or those that match the label selector."""
        ...

    def text(self, path: str) -> str:
        """Return the body of the answer to a GET of this path."""
        ...


def pods_of(cluster: Cluster, component: str) -> list[Any]:
    """Return the pods of a component, in whatever namespace it was installed."""
    return cluster.list(PODS, selector=f"{PODS_OF}{component}", namespace=EVERYWHERE)


def missing(cluster: Cluster, component: str) -> Finding:
    """Return the finding that a component has no pod, with what its Deployment or DaemonSet says."""
    what = WORKLOADS[component]
    kind = DEPLOYMENTS if what.startswith("deployment/") else DAEMONSETS
    found = cluster.list(kind, selector=f"{PODS_OF}{component}", namespace=EVERYWHERE)
    if not found:
        return bad(component, f"{what} is not installed", "kubectl apply -k manifests/")
    namespace = found[0]["metadata"].get("namespace", "")
    wanted = found[0].get("spec", {}).get("replicas", found[0].get("status", {}).get("desiredNumberScheduled"))
    text = f"no pod of {what} runs" + (f"; {wanted} are wanted" if wanted is not None else "")
    return bad(component, text, f"kubectl -n {namespace} describe {what}")


def controller(cluster: Cluster, pods: list[Any]) -> Finding:
    """Check that a pod of the controller is ready. One is enough: only one replica works at a time."""
    ready = [pod for pod in pods if is_true(pod, "Ready")]
    if not pods:
        return missing(cluster, "controller")
    if not ready:
        return bad("controller", f"not ready: {_troubles(pods)}", _look_at(pods[0]))
    return ok("controller", f"{len(ready)} of {len(pods)} pods are ready")


def on_nodes(cluster: Cluster, component: str, pods: list[Any], nodes: Iterable[str]) -> Iterator[Finding]:
    """Check a DaemonSet. nodes: the nodes that need a ready pod of it; if empty, one ready pod anywhere is enough."""
    needed = sorted(nodes)
    unready = [pod for pod in pods if not is_true(pod, "Ready")]
    in_the_way = [pod for pod in unready if node_of(pod) in needed] if needed else unready
    bare = [node for node in needed if node not in {node_of(pod) for pod in pods}]
    if not pods:
        yield missing(cluster, component)
    elif bare:
        where = pods[0]["metadata"].get("namespace", "")
        todo = f"kubectl -n {where} describe {WORKLOADS[component]}: nodeSelector, tolerations; the node's taints"
        yield bad(component, f"no pod of {WORKLOADS[component]} on {', '.join(bare[:SHOWN])}", todo)
    elif in_the_way and (needed or len(in_the_way) == len(pods)):
        yield bad(component, f"not ready: {_troubles(in_the_way)}", _look_at(in_the_way[0]))
    elif unready:
        yield warn(component, f"not ready, where no pod uses it: {_troubles(unready)}", _look_at(unready[0]))
    else:
        yield ok(component, f"{len(pods)} of {len(pods)} pods are ready")


def mount(cluster: Cluster, handle: str, node: str, daemons: list[Any], plugins: list[Any]) -> Iterator[Finding]:
    """Check a volume on a node whose pods use it, by the Prometheus metrics of the mount daemon and the node plugin."""
    daemon = next(pod for pod in daemons if node_of(pod) == node)
    plugin = next(pod for pod in plugins if node_of(pod) == node)
    try:
        told = {**_numbers(cluster, plugin, handle), **_numbers(cluster, daemon, handle)}
    except AccessDenied as error:
        yield warn("mount", f"{node} could not be asked: {error}", "needs the right to get pods/proxy there")
        return
    except DatastoreError as error:
        yield bad("mount", f"{node} does not answer: {error}", _look_at(daemon))
        return
    if told.get("datastore_csi_volume_mounted") == 0 or "datastore_mount_up" not in told:
        todo = "delete these pods: the next ones get a new mount, with what was written"
        yield bad("mount", f"{node} has lost the mount that pods run with", todo)
    elif told["datastore_mount_up"] == 0:
        todo = f"it is replaced by itself within seconds; if it stays so: {_look_at(daemon)}"
        yield bad("mount", f"the mount's server on {node} does not answer", todo)
    elif unsent := int(told.get("datastore_mount_unsent_files", 0)):
        size = format_size(int(told.get("datastore_mount_unsent_bytes", 0)))
        text = f"the mount's server on {node} answers; {unsent} files ({size}) are not in the storage yet"
        yield warn("mount", text, f"if it stays so: {_look_at(daemon)}; keep the node until they are sent")
    else:
        yield ok("mount", f"the mount's server on {node} answers")


def _numbers(cluster: Cluster, pod: Any, handle: str) -> dict[str, float]:
    """Return the samples of a pod's metrics whose only label is this volume, by name."""
    ports = [port for each in pod["spec"].get("containers", []) for port in each.get("ports", [])]
    port = next((each["containerPort"] for each in ports if each.get("name") == "http"), "")
    where = f"{pod['metadata'].get('namespace', '')}/pods/{pod['metadata']['name']}:{port}"
    text = cluster.text(f"/api/v1/namespaces/{where}/proxy/metrics")
    return {name: float(value) for name, volume, value in _SAMPLE.findall(text) if volume == handle}


def node_of(pod: Any) -> str:
    """Return the name of the pod's node, '' while it has none."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def _troubles(pods: list[Any]) -> str:
    return ", ".join(f"{pod['metadata']['name']} on {node_of(pod) or 'no node'}{_why(pod)}" for pod in pods[:SHOWN])


def _why(pod: Any) -> str:
    """Return the kubelet's reason for the first container that waits or has ended, in parentheses, or ''."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        state = container.get("state") or {}
        told = state.get("waiting") or state.get("terminated") or {}
        if told.get("reason"):
            return f" ({told['reason']}{': ' + told['message'] if told.get('message') else ''})"
    return ""


def _look_at(pod: Any) -> str:
    where = f"kubectl -n {pod['metadata'].get('namespace', '')}"
    return f"{where} logs {pod['metadata']['name']}, {where} describe pod {pod['metadata']['name']}"
