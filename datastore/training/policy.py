"""The run policy: what becomes of a job, seen from what its tasks did. Pure, and shared by all launchers.

A launcher calls `decide` whenever a task changed and when time passed, and does what the decision says.

Exit codes: 0 is success, 1 to 127 are the program's own failures and end the job, 128 and above (a signal: 137 is a
kill, 143 an eviction) and a lost node are nobody's fault and are tried again, `backoff_limit` times in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from datastore.api.trainingjob import TrainingJobSpec
from datastore.training.frameworks import FRAMEWORKS
from datastore.training.topology import Task, Topology

FIRST_RETRIED_CODE = 128
MAX_DELAY_S = 60.0


class State(StrEnum):
    """Of a task."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    FREED = "Freed"
    """Ended by the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """What a task does now. lost: its machine is gone, so there is no exit code. reason: of a failure, for people."""

    task: Task
    state: State
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""

    @property
    def retriable(self) -> bool:
        """Whether it failed, and not by its own fault."""
        by_signal = self.exit_code is not None and self.exit_code >= FIRST_RETRIED_CODE
        return self.state is State.FAILED and (self.lost or by_signal)

    @property
    def failure(self) -> str:
        """Such as 'worker-0 ended with exit code 137 (OOMKilled)'."""
        what = "was lost with its machine" if self.lost else f"ended with exit code {self.exit_code}"
        return f"{self.task.name} {what}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """The policy of one job, every default applied."""

    success: Literal["chief", "allWorkers"]
    restart: Literal["replica", "all"]
    backoff_limit: int
    deadline_s: float | None
    evaluator_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a launcher sees: all tasks, restarts so far, seconds since the start, and since the training succeeded."""

    tasks: Sequence[TaskState]
    restarts: int = 0
    running_s: float = 0.0
    trained_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do but wait; no longer than so many seconds, if any, until the next look."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these tasks again, after so many seconds; those of them that run are ended at once."""

    tasks: tuple[Task, ...]
    delay_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """The training has succeeded: end these tasks, and wait for the evaluator."""

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: end everything. reason: one CamelCase word, for conditions."""

    succeeded: bool
    reason: str
    message: str


Decision = Wait | Restart | Release | Finish


def policy_of(spec: TrainingJobSpec, topology: Topology) -> RunPolicy:
    """What the job says, else what its framework does."""
    framework = FRAMEWORKS[spec.framework]
    return RunPolicy(
        success=spec.success or framework.success,
        restart=spec.restart or framework.restart(topology),
        backoff_limit=spec.backoff_limit,
        deadline_s=spec.active_deadline_seconds,
        evaluator_grace_s=spec.evaluator_grace_seconds,
    )


def decide(policy: RunPolicy, seen: Seen) -> Decision:
    """What to do now. Failures go before success, and success before the deadline."""
    failed = [each for each in seen.tasks if each.state is State.FAILED]
    if broken := next((each for each in failed if not each.retriable), None):
        return Finish(False, "TaskFailed", broken.failure)
    if _trained(policy, seen.tasks):
        return _wait_for_evaluator(policy, seen)
    if policy.deadline_s is not None and seen.running_s >= policy.deadline_s:
        return Finish(False, "DeadlineExceeded", f"it ran for its activeDeadlineSeconds, {policy.deadline_s:.0f}")
    if failed:
        return _again(policy, seen, failed)
    return Wait(None if policy.deadline_s is None else policy.deadline_s - seen.running_s)


def _again(policy: RunPolicy, seen: Seen, failed: Sequence[TaskState]) -> Decision:
    why = failed[0].failure
    if seen.restarts >= policy.backoff_limit:
        return Finish(False, "BackoffLimitExceeded", f"{why}, after {seen.restarts} restarts")
    again = seen.tasks if policy.restart == "all" else failed
    return Restart(tuple(each.task for each in again), restart_delay_s(seen.restarts), why)


def restart_delay_s(restarts: int) -> float:
    """Seconds before a restart: 1, 2, 4 and so on, a minute at most."""
    return float(min(2 ** min(restarts, 16), MAX_DELAY_S))


def _trained(policy: RunPolicy, tasks: Sequence[TaskState]) -> bool:
    """Whether the training itself has succeeded; the evaluator may go on."""
    workers = [each for each in tasks if each.task.role in ("master", "worker")]
    wanted = workers[:1] if policy.success == "chief" else workers
    return all(each.state is State.SUCCEEDED for each in wanted)


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


def _ended(task: TaskState) -> bool:
    return task.state in (State.SUCCEEDED, State.FAILED, State.FREED)
