"""Plays the kubelets of a cluster without nodes: the pods of TrainingJobs run and end as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from datastore.api.resources import PODS
from datastore.errors import DatastoreError, Unreachable
from datastore.kubeclient import EVERYWHERE, KubeClient, of_context
from datastore.training.cluster import names
from tests.cluster.kube import Manifest

POLL_S = 0.1
RUNS = None
"""As an outcome: it goes on."""

Outcome = Callable[[Manifest], int | None]
"""Exit code with which a running pod ends now, or RUNS."""


@contextmanager
def playing(kubeconfig: Path, outcome: Outcome, but: Callable[[Manifest], bool] = lambda _: False) -> Iterator[None]:
    """While the block runs, every pod that may start runs, and then ends as `outcome` says; `but`: those that wait."""
    client, stop = of_context({"KUBECONFIG": str(kubeconfig)}), threading.Event()
    thread = threading.Thread(target=_play, args=(client, outcome, but, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(300)


def _play(client: KubeClient, outcome: Outcome, but: Callable[[Manifest], bool], stop: threading.Event) -> None:
    while not stop.wait(POLL_S):
        try:
            pods = client.list(PODS, namespace=EVERYWHERE, selector=names.JOB)
        except Unreachable:
            continue  # a busy machine: it is asked again, as a kubelet would
        for pod in pods:
            status = None if but(pod) else _next(pod, outcome)
            if status is not None:
                about = pod["metadata"]
                try:
                    change = {"status": status}
                    client.patch(PODS, f"{about['name']}/status", change, namespace=about["namespace"])
                except DatastoreError:
                    pass  # it is gone by now, or has its turn again


def _next(pod: Manifest, outcome: Outcome) -> dict[str, Any] | None:
    phase, now = pod["status"].get("phase"), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if phase == "Pending" and not pod["spec"].get("schedulingGates"):
        return {"phase": "Running", "startTime": now, **_container({"running": {"startedAt": now}}, ready=True)}
    if phase == "Running" and "deletionTimestamp" not in pod["metadata"]:
        code = outcome(pod)
        if code is not RUNS:
            ended = {"exitCode": code, "startedAt": now, "finishedAt": now, "reason": "Error" if code else "Completed"}
            return {"phase": "Failed" if code else "Succeeded", **_container({"terminated": ended}, ready=False)}
    return None


def _container(state: dict[str, Any], *, ready: bool) -> dict[str, Any]:
    given = {"name": names.CONTAINER, "image": "none", "imageID": "", "restartCount": 0, "ready": ready, "state": state}
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": None}
    return {"containerStatuses": [given], "conditions": [condition]}
