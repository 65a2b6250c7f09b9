"""Shows a directory of a job's Datastores in TensorBoard, in a pod that only the API server can reach."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from datastore.api.objects import is_true
from datastore.api.resources import PODS, TRAININGJOBS
from datastore.errors import DatastoreError, InvalidManifest
from datastore.kubeclient import KubeClient
from datastore.mounting.signals import SignalWatch
from datastore.training.cluster import names
from datastore.training.driver import NoSuchJob

START_S = 300.0
POLL_S = 0.5


def forwarding(name: str, namespace: str, port: int) -> list[str]:
    """Return the command that forwards a port of this machine to a job's TensorBoard. Errors: DatastoreError."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise DatastoreError("kubectl is not on PATH, and it forwards the port to the cluster: install kubectl")
    target = [f"job/{names.board_name(name)}", f"{port or ''}:{names.BOARD_PORT}"]
    return [kubectl, "port-forward", f"--namespace={namespace}", "--address=127.0.0.1", *target]


@contextmanager
def wanted(
    client: KubeClient, name: str, namespace: str, datastore: str, path: str, watch: SignalWatch
) -> Iterator[None]:
    """Wait for a TensorBoard that answers: the running job's own, or one that the controller starts at our request and
    for the length of the block. datastore '': spec.tensorboard names Datastore and path. Errors: DatastoreError."""
    body = client.get(TRAININGJOBS, name, namespace=namespace)
    if body is None:
        raise NoSuchJob(f"there is no TrainingJob {name} in namespace {namespace}, nor on this machine")
    place = body["spec"].get("tensorboard") or {}
    if not datastore and not place:
        raise InvalidManifest(f"TrainingJob {name} has no spec.tensorboard: say --datastore NAME [--path DIR]")
    known = [each["name"] for each in body["spec"].get("datastores") or []]
    if datastore and datastore not in known:
        raise InvalidManifest(f"{datastore} is none of the Datastores of TrainingJob {name}: {', '.join(known)}")
    wish = ""
    if datastore or not (body.get("status") or {}).get("tensorboard"):
        chosen = f"{datastore}/{path}" if datastore else f"{place['datastore']}/{place.get('path', '')}"
        wish = f"{chosen} {uuid.uuid4().hex[:8]}"
        _annotate(client, name, namespace, wish)
    try:
        _wait(client, name, namespace, wish, watch)
        yield
    finally:
        if wish:
            _annotate(client, name, namespace, None)


def _annotate(client: KubeClient, name: str, namespace: str, wish: str | None) -> None:
    client.patch(TRAININGJOBS, name, {"metadata": {"annotations": {names.BOARD: wish}}}, namespace=namespace)


def _wait(client: KubeClient, name: str, namespace: str, wish: str, watch: SignalWatch) -> None:
    """Wait until the TensorBoard's pod is ready. Errors: DatastoreError with what it waits for, after START_S."""
    until, waits = time.monotonic() + START_S, "its controller (deployment datastore-training-controller)"
    while time.monotonic() < until:
        for pod in client.list(PODS, namespace=namespace, selector=f"{names.BOARD}={name}"):
            if "deletionTimestamp" in pod["metadata"] or (wish and not _serves(pod, wish)):
                continue
            if is_true(pod, "Ready"):
                return
            waits = _waiting(pod)
        watch.wait([], POLL_S)
        if watch.take() is not None:
            raise DatastoreError("interrupted")
    raise DatastoreError(f"the TensorBoard of {name} does not answer after {START_S:.0f} s; it waits for {waits}")


def _serves(pod: Mapping[str, Any], wish: str) -> bool:
    return bool((pod["metadata"].get("annotations") or {}).get(names.BOARD) == wish)


def _waiting(pod: Mapping[str, Any]) -> str:
    for each in (pod.get("status") or {}).get("containerStatuses") or []:
        for what in ("waiting", "terminated"):
            if found := (each.get("state") or {}).get(what):
                return f"its container: {found.get('reason', '')} {str(found.get('message', ''))[-500:]}".strip()
    return f"its pod {pod['metadata']['name']}, which is {(pod.get('status') or {}).get('phase', 'Pending')}"
