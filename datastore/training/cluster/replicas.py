"""Derives the states of a TrainingJob's replicas from their Jobs and pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from datastore.api.objects import condition, is_true
from datastore.training.cluster import names
from datastore.training.evidence import ReplicaEvidence, last_words
from datastore.training.policy import State, TaskState
from datastore.training.topology import Task, Topology

Raw = Mapping[str, Any]

ENDED = ("Succeeded", "Failed")
_NOT_STARTED = ("StartError", "ContainerCannotRun", "RunContainerError")
NOT_FOUND_CODE = 127
"""A shell's exit code for a missing command. A container that can't start gets it too, so that it is not restarted."""
UNSCHEDULABLE = "Unschedulable"
"""Reason of a pod's PodScheduled=False when the scheduler finds no node for the pod."""
_TAINTED = "DeletionByTaintManager"
"""Reason of a pod's DisruptionTarget when its node does not answer, or has a taint that the pod doesn't tolerate."""
_FAILURES = "batch.kubernetes.io/job-index-failure-count"
"""Annotation of a pod of a Job with backoffLimitPerIndex: how many pods of its index failed before this pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One task and its state. pods: the task's pods of this attempt, the newest last. waiting: why it does not run or
    may soon stop, for people. unschedulable: the scheduler finds no node. image: the imageID that the node reports."""

    state: TaskState
    pods: tuple[Raw, ...] = ()
    started_at: datetime | None = None
    waiting: str = ""
    unschedulable: bool = False
    image: str = ""

    @property
    def task(self) -> Task:
        """The task whose replica this is."""
        return self.state.task

    @property
    def ended_at(self) -> datetime | None:
        """When it ended, if it has and that is known."""
        return self.state.ended_at

    @property
    def restarts(self) -> int:
        """How often this replica alone was restarted. The newest pod counts earlier pods, also those that are gone."""
        if not self.pods:
            return 0
        told = (self.pods[-1]["metadata"].get("annotations") or {}).get(_FAILURES, "0")
        return max(len(self.pods) - 1, int(told))

    def evidence(self, restarts: int) -> ReplicaEvidence:
        """Return the evidence of the replica, without its log. restarts: those of all replicas together."""
        return ReplicaEvidence.model_validate(
            {
                "role": self.task.role,
                "index": self.task.index,
                "state": self.state.state,
                "exitCode": self.state.exit_code,
                "reason": self.state.reason,
                "restarts": restarts + self.restarts,
                "startedAt": self.started_at,
                "endedAt": self.ended_at,
                "image": self.image,
            }
        )


def replicas_of(topology: Topology, jobs: Mapping[str, Raw], pods: Sequence[Raw]) -> list[Replica]:
    """Return all replicas, by role and index. The state of an ended task whose pod is gone is taken from its Job."""
    by_task: dict[tuple[str, int], list[Raw]] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        attempt = (jobs.get(labels.get(names.ROLE, ""), {}).get("metadata") or {}).get("labels", {}).get(names.ATTEMPT)
        if attempt in (None, labels.get(names.ATTEMPT)):
            by_task.setdefault((labels.get(names.ROLE, ""), index_of(pod)), []).append(pod)
    found = []
    for task in topology.tasks:
        own = sorted(by_task.get((task.role, task.index), []), key=_age)
        status = jobs.get(task.role, {}).get("status") or {}
        if own:
            found.append(_of_pod(task, own))
        elif task.index in _indexes(status.get("completedIndexes") or ""):
            found.append(Replica(state=TaskState(task=task, state=State.SUCCEEDED, exit_code=0)))
        elif task.index in _indexes(status.get("failedIndexes") or ""):
            # A pod that failed by itself would still exist. This pod was removed, as are the pods of a lost node.
            found.append(Replica(state=TaskState(task=task, state=State.FAILED, lost=True, reason="its pod is gone")))
        else:
            found.append(Replica(state=TaskState(task=task, state=State.PENDING), waiting=_unmade(jobs.get(task.role))))
    return found


def index_of(pod: Raw) -> int:
    """Return the index of a pod in its role; -1 when it has none."""
    metadata = pod["metadata"]
    text = (metadata.get("labels") or {}).get(names.INDEX) or (metadata.get("annotations") or {}).get(names.INDEX)
    return int(text) if text and text.isdigit() else -1


def active(pods: Sequence[Raw]) -> list[Raw]:
    """Return the pods that use resources of a node, or still may."""
    return [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ENDED]


def _age(pod: Raw) -> tuple[str, str]:
    return (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"])


def _of_pod(task: Task, pods: list[Raw]) -> Replica:
    pod = pods[-1]
    status = pod.get("status") or {}
    container = _container(status)
    terminated = (container.get("state") or {}).get("terminated") or {}
    running = (container.get("state") or {}).get("running") or {}
    phase = status.get("phase", "Pending")
    if phase in ENDED:
        state = State.SUCCEEDED if phase == "Succeeded" else State.FAILED
    else:
        state = State.RUNNING if running or terminated else State.PENDING
    lost = is_true(pod, "DisruptionTarget")
    scheduled = condition(pod, "PodScheduled")
    code = terminated.get("exitCode")
    reason = str(terminated.get("reason") or status.get("reason") or "")
    message = str(terminated.get("message") or "")
    started = time_of(terminated.get("startedAt") or running.get("startedAt"))
    if reason in _NOT_STARTED:
        code, started = NOT_FOUND_CODE, None  # the kubelet says that it was started at the beginning of 1970
        reason, message = f"{reason}: {message.strip()[:500]}", ""
    if state is State.SUCCEEDED and code is None:
        code = 0
    ended = state in (State.SUCCEEDED, State.FAILED)
    return Replica(
        state=TaskState(
            task=task,
            state=state,
            exit_code=code if ended else None,
            lost=state is State.FAILED and (lost or code is None),
            reason=reason if state is State.FAILED and reason != "Error" else "",
            said=last_words(message) if state is State.FAILED else "",
            ended_at=time_of(terminated.get("finishedAt")) if ended else None,
        ),
        pods=tuple(pods),
        started_at=started,
        waiting=_waiting(pod, container, state),
        unschedulable=state is State.PENDING
        and (scheduled.get("status"), scheduled.get("reason")) == ("False", UNSCHEDULABLE),
        image=str(container.get("imageID") or ""),
    )


def _container(status: Raw) -> Raw:
    found: Sequence[Raw] = status.get("containerStatuses") or []
    return next((each for each in found if each.get("name") == names.CONTAINER), {})


def _waiting(pod: Raw, container: Raw, state: State) -> str:
    disrupted, scheduled = condition(pod, "DisruptionTarget"), condition(pod, "PodScheduled")
    if state is State.RUNNING and disrupted.get("status") == "True" and disrupted.get("reason") == _TAINTED:
        node = pod["spec"].get("nodeName", "")
        return (
            f"its node {node} does not answer, or takes no pods any more; if the node is lost, delete the Node {node} "
            "or taint it node.kubernetes.io/out-of-service, and it starts on another one"
        )
    if state is not State.PENDING:
        return ""
    waiting = (container.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in ("ContainerCreating", "PodInitializing"):
        # Why its volumes are not mounted is told by Events of the pod only.
        return f"{waiting['reason']}; if that lasts, `kubectl describe pod {pod['metadata']['name']}` says why"
    if waiting.get("reason"):
        return f"{waiting['reason']}: {waiting.get('message', '')}"
    if scheduled.get("status") == "False" and scheduled.get("reason") != "SchedulingGated":
        return f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
    return ""


def _unmade(job: Raw | None) -> str:
    """Return why a task may have no pod although its Job exists; '' when that is expected."""
    if job is None or job["spec"].get("suspend") or (job.get("status") or {}).get("active"):
        return ""
    return f"it has no pod yet; `kubectl describe job {job['metadata']['name']}` tells what the cluster refuses, if so"


def _indexes(text: str) -> set[int]:
    """Return {1, 3, 4, 5} for '1,3-5', the format of completedIndexes and failedIndexes in batch/v1."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def time_of(text: str | None) -> datetime | None:
    """Return a time from the text that the API server uses."""
    return datetime.fromisoformat(text) if text else None
