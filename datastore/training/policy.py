"""The run policy: it decides from the states of a job's tasks what to do next. Pure, and shared by all launchers.

A launcher calls `decide` when the state of a task has changed and again after some time, and carries out the decision.

Exit codes: 0 is success; 1 to 127 are failures of the program, and end the job. After 128 and above (a signal: 137 is
a kill, 143 an eviction) and after the loss of a node, tasks are restarted, at most `backoff_limit` times in all. In a
collective the others lose their connections to a task that is killed, and fail with exit codes of 1 to 127 themselves.
So if all tasks are restarted together, one that was killed tells why the others failed. An abort (134) does not: so a
task ends that waits in vain for one that failed (NCCL's watchdog, JAX's coordination service).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar

from datastore.api.trainingjob import TrainingJobSpec
from datastore.training.frameworks import FRAMEWORKS
from datastore.training.topology import RANKED, Task, Topology
from datastore.units import format_count

FIRST_RETRIED_CODE = 128
ABORTED = FIRST_RETRIED_CODE + signal.SIGABRT
MAX_DELAY_S = 60.0
SETTLE_S = 3.0
"""How long a failed task of a collective waits for the report of the one that tells why, because two nodes report
independently: a kubelet looks at its containers every second, and then writes the status of the pod."""


class _OfTask(Protocol):
    @property
    def task(self) -> Task: ...


Tasked = TypeVar("Tasked", bound=_OfTask)


class State(StrEnum):
    """The state of a task."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    FREED = "Freed"
    """The launcher has ended the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """The state of a task. lost: its machine or pod was taken away. reason: more about a failure, for people. said:
    what its log says about the failure (evidence.last_words). ended_at: when it ended, if that is known."""

    task: Task
    state: State
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""
    said: str = ""
    ended_at: datetime | None = None

    @property
    def retriable(self) -> bool:
        """Whether the task failed for a reason that is not in its program, so that it may be started again."""
        by_signal = self.exit_code is not None and self.exit_code >= FIRST_RETRIED_CODE
        return self.state is State.FAILED and (self.lost or by_signal)

    @property
    def failure(self) -> str:
        """The failure in words, such as 'worker-0 ended with exit code 137 (OOMKilled)', or 139 (SIGSEGV)."""
        if self.lost:
            what, why = "was lost with its machine", self.reason
        else:
            what, why = f"ended with exit code {self.exit_code}", self.reason or _signal(self.exit_code or 0)
        return f"{self.task.name} {what}{f' ({why})' if why else ''}"


def _signal(exit_code: int) -> str:
    """Return the name of the signal that an exit code stands for, as shells count; '' for other codes."""
    try:
        return signal.Signals(exit_code - FIRST_RETRIED_CODE).name
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """The policy of one job, with every default filled in."""

    success: Literal["chief", "allWorkers"]
    restart: Literal["replica", "all"]
    backoff_limit: int
    deadline_s: float | None
    evaluator_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The input of decide(): all tasks, restarts so far, seconds since the start, since the training succeeded, and
    since the first task failed."""

    tasks: Sequence[TaskState]
    restarts: int = 0
    running_s: float = 0.0
    trained_s: float | None = None
    failed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait. seconds: the most until decide() has to be called again; None: no limit."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """A task has failed, maybe because of another one: wait at most these seconds for the report of that."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Restart:
    """End these tasks at once if they run, and start them again after delay_s."""

    tasks: tuple[Task, ...]
    delay_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """The training has succeeded: end these tasks, and let the evaluator continue."""

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job has ended: end all its tasks. reason: one CamelCase word, for conditions."""

    succeeded: bool
    reason: str
    message: str


Decision = Wait | Settle | Restart | Release | Finish


def policy_of(spec: TrainingJobSpec, topology: Topology) -> RunPolicy:
    """Return the policy that the job's spec sets; its framework sets success and restart where the spec does not."""
    framework = FRAMEWORKS[spec.framework]
    return RunPolicy(
        success=spec.success or framework.success,
        restart=spec.restart or framework.restart(topology),
        backoff_limit=spec.backoff_limit,
        deadline_s=spec.active_deadline_seconds,
        evaluator_grace_s=spec.evaluator_grace_seconds,
    )


def decide(policy: RunPolicy, seen: Seen) -> Decision:
    """Return what to do. A final failure comes before success, then the deadline, then the restart of failed tasks."""
    failed = sorted((each for each in seen.tasks if each.state is State.FAILED), key=_ended_at)  # the first tells why
    killed = [each for each in failed if each.retriable]
    together = policy.restart == "all"
    broken = next((each for each in failed if not each.retriable), None)
    if not (together and any(each.exit_code != ABORTED for each in killed)):
        since_s = SETTLE_S if seen.failed_s is None else seen.failed_s
        running = any(each.state is State.RUNNING for each in seen.tasks)
        if together and failed and running and since_s < SETTLE_S:
            return Settle(SETTLE_S - since_s)
        if broken:
            return _failed("TaskFailed", broken.failure, broken)
    if _trained(policy, seen.tasks):
        return _wait_for_evaluator(policy, seen)
    if policy.deadline_s is not None and seen.running_s >= policy.deadline_s:
        return Finish(False, "DeadlineExceeded", f"it ran for its activeDeadlineSeconds, {policy.deadline_s:.0f}")
    if killed:
        return _again(policy, seen, killed, f", and {broken.failure}" if broken else "")
    return Wait(None if policy.deadline_s is None else policy.deadline_s - seen.running_s)


def _again(policy: RunPolicy, seen: Seen, killed: Sequence[TaskState], more: str) -> Decision:
    cause = min(killed, key=lambda each: each.exit_code == ABORTED)
    why = cause.failure + more
    if seen.restarts >= policy.backoff_limit:
        return _failed("BackoffLimitExceeded", f"{why}, after {format_count(seen.restarts, 'restart')}", cause)
    again = seen.tasks if policy.restart == "all" else killed
    return Restart(tuple(each.task for each in again), restart_delay_s(seen.restarts), why)


def _failed(reason: str, message: str, task: TaskState) -> Finish:
    return Finish(False, reason, f"{message}; its log says: {task.said}" if task.said else message)


def restart_delay_s(restarts: int) -> float:
    """Return the seconds before a restart: 1, 2, 4 and so on, at most a minute."""
    return float(min(2 ** min(restarts, 16), MAX_DELAY_S))


def _trained(policy: RunPolicy, tasks: Sequence[TaskState]) -> bool:
    """Return whether the training itself has succeeded, whatever the evaluator and parameter servers do."""
    return all(each.state is State.SUCCEEDED for each in decisive(policy, tasks))


def decisive(policy: RunPolicy, found: Sequence[Tasked]) -> list[Tasked]:
    """Return those of the tasks or replicas whose success is the success of the training."""
    ranked = [each for each in found if each.task.role in RANKED]
    return ranked[:1] if policy.success == "chief" else ranked


def counts(tasks: Sequence[TaskState]) -> list[dict[str, Any]]:
    """Return status.roles: for each role that has tasks, how many of them are in which state."""
    roles = []
    for role in dict.fromkeys(each.task.role for each in tasks):
        states = [each.state for each in tasks if each.task.role == role]
        roles.append(
            {
                "role": role,
                "replicas": len(states),
                "active": states.count(State.RUNNING),
                "succeeded": states.count(State.SUCCEEDED),
                "failed": states.count(State.FAILED),
            }
        )
    return roles


def _wait_for_evaluator(policy: RunPolicy, seen: Seen) -> Decision:
    evaluating = [each for each in seen.tasks if each.task.role == "evaluator" and not _ended(each)]
    if not evaluating:
        return Finish(True, "Completed", "the training has succeeded")
    rest = tuple(each.task for each in seen.tasks if each.task.role != "evaluator" and not _ended(each))
    if rest or seen.trained_s is None:
        return Release(rest)
    left_s = policy.evaluator_grace_s - seen.trained_s
    if policy.deadline_s is not None:
        left_s = min(left_s, policy.deadline_s - seen.running_s)
    if left_s > 0:
        return Wait(left_s)
    message = f"the training has succeeded; the evaluator was ended {seen.trained_s:.0f} s after that"
    return Finish(True, "EvaluatorEnded", message)


def _ended_at(task: TaskState) -> datetime:
    return task.ended_at or datetime.max.replace(tzinfo=UTC)


def _ended(task: TaskState) -> bool:
    return task.state in (State.SUCCEEDED, State.FAILED, State.FREED)
