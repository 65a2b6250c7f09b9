"""datastore.training.policy: when a job has succeeded, has failed, or starts something again (S-323, S-324, S-325)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from datastore.training.policy import (
    Decision,
    Finish,
    Release,
    Restart,
    Seen,
    Settle,
    State,
    TaskState,
    Wait,
    decide,
    policy_of,
    restart_delay_s,
)
from datastore.training.topology import Task
from tests.promises import promise
from tests.unit.training.jobs import in_a_cluster, job

ALL = "roles: {worker: {replicas: 2}, ps: {}, evaluator: {}}"
TWO = in_a_cluster(job("roles: {worker: {}}", "pytorch"))
RUNNING, DONE, FAILED = State.RUNNING, State.SUCCEEDED, State.FAILED


def tasks(spec: str, framework: str = "tensorflow", **codes: int | str) -> list[TaskState]:
    """Decide with all tasks running but those named: worker_1=0 has ended with 0; 'lost' and 'freed' are states."""
    found = []
    for task in in_a_cluster(job(spec, framework)).tasks:
        code = codes.get(task.name.replace("-", "_"))
        if code is None:
            found.append(TaskState(task=task, state=RUNNING))
        elif code == "freed":
            found.append(TaskState(task=task, state=State.FREED))
        elif code == "lost":
            found.append(TaskState(task=task, state=FAILED, lost=True))
        else:
            found.append(TaskState(task=task, state=FAILED if code else DONE, exit_code=int(code)))
    return found


def decision(
    spec: str,
    framework: str = "tensorflow",
    restarts: int = 0,
    trained_s: float | None = None,
    failed_s: float | None = None,
    **codes: int | str,
) -> Decision:
    made = job(spec, framework)
    there = tasks(spec, framework, **codes)
    seen = Seen(tasks=there, restarts=restarts, running_s=50.0, trained_s=trained_s, failed_s=failed_s)
    return decide(policy_of(made.spec, in_a_cluster(made)), seen)


def names(found: tuple[Task, ...]) -> list[str]:
    return [task.name for task in found]


def test_a_job_without_finished_tasks_goes_on() -> None:
    assert decision(ALL) == Wait(None)


@promise("S-323")
def test_the_chief_decides_and_the_rest_is_released_while_the_evaluator_goes_on() -> None:
    found = decision(ALL, master_0=0)
    assert isinstance(found, Release)
    assert names(found.tasks) == ["ps-0", "worker-0", "worker-1"]
    freed: dict[str, Any] = {"ps_0": "freed", "worker_0": "freed", "worker_1": "freed"}
    assert decision(ALL, master_0=0, trained_s=10.0, **freed) == Wait(590.0)
    assert decision(ALL, master_0=0, trained_s=10.0, evaluator_0=0, **freed) == Finish(
        True, "Completed", "the training has succeeded"
    )


@promise("S-323")
def test_an_evaluator_that_does_not_end_is_ended_and_the_job_has_succeeded() -> None:
    spec = ALL + ", evaluatorGraceSeconds: 5"
    found = decision(spec, master_0=0, trained_s=5.0, ps_0="freed", worker_0="freed", worker_1="freed")
    assert isinstance(found, Finish)
    assert (found.succeeded, found.reason) == (True, "EvaluatorEnded")


@promise("S-323")
def test_all_workers_have_to_succeed_where_they_are_equal() -> None:
    spec = "roles: {worker: {replicas: 2}}"
    assert decision(spec, "pytorch", master_0=0, worker_0=0) == Wait(None)
    assert decision(spec, "pytorch", master_0=0, worker_0=0, worker_1=0) == Finish(
        True, "Completed", "the training has succeeded"
    )
    assert isinstance(decision(spec + ", success: chief", "pytorch", master_0=0), Finish)
    assert decision(spec + ", success: allWorkers", "tensorflow", master_0=0) == Wait(None)


@promise("S-323")
def test_without_a_master_worker_0_is_the_chief() -> None:
    spec = "roles: {master: {replicas: 0}, worker: {replicas: 2}}"
    assert decision(spec, worker_1=0) == Wait(None)
    assert isinstance(decision(spec, worker_0=0), Finish)


@promise("S-324")
@pytest.mark.parametrize("task", ["master_0", "worker_1", "ps_0", "evaluator_0"])
@pytest.mark.parametrize("code", [1, 2, 127])
def test_a_failure_of_the_program_ends_the_job(task: str, code: int) -> None:
    ended: dict[str, Any] = {task: code}
    found = decision(ALL, **ended)
    assert found == Finish(False, "TaskFailed", f"{task.replace('_', '-')} ended with exit code {code}")


@promise("S-324")
@pytest.mark.parametrize("code", [128, 137, 143, 255, "lost"])
def test_a_kill_or_a_lost_node_starts_the_replica_again_with_parameter_servers(code: int | str) -> None:
    found = decision(ALL, worker_1=code)
    assert isinstance(found, Restart)
    assert names(found.tasks) == ["worker-1"]


@promise("S-324")
@pytest.mark.parametrize("framework", ["tensorflow", "pytorch", "jax", "mxnet", "mpi"])
def test_a_kill_starts_all_again_in_collectives(framework: str) -> None:
    found = decision("roles: {worker: {replicas: 2}}", framework, worker_1=137)
    assert isinstance(found, Restart)
    assert names(found.tasks) == ["master-0", "worker-0", "worker-1"]
    assert found.why == "worker-1 ended with exit code 137 (SIGKILL)"


@promise("S-324")
@pytest.mark.parametrize("code", [137, "lost"])
def test_those_that_fail_because_another_one_was_killed_start_again_with_it(code: int | str) -> None:
    """In a collective its connections break, and the others end with exit codes of their own. Nodes report in any
    order."""
    pair = "roles: {worker: {replicas: 2}}"
    waits = decision(pair, "pytorch", master_0=1, failed_s=1.0)
    assert waits == Settle(2.0)
    both = decision(pair, "pytorch", master_0=1, worker_1=code, failed_s=1.0)
    assert isinstance(both, Restart)
    assert names(both.tasks) == ["master-0", "worker-0", "worker-1"]
    assert both.why.endswith(", and master-0 ended with exit code 1")


@promise("S-324", "S-331")
def test_the_replica_that_failed_first_tells_why() -> None:
    """The others of a collective have lost their connections to it."""
    master, worker = tasks("roles: {worker: {}}", "pytorch", master_0=1, worker_0=1)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    first = replace(worker, said="ValueError: bad batch", ended_at=at)
    then = replace(master, said="RuntimeError: connection reset", ended_at=at + timedelta(seconds=1))
    found = decide(policy_of(job("roles: {worker: {}}", "pytorch").spec, TWO), Seen(tasks=[then, first]))
    assert found == Finish(False, "TaskFailed", "worker-0 ended with exit code 1; its log says: ValueError: bad batch")


@promise("S-324")
def test_an_abort_beside_a_failure_of_the_program_restarts_nothing() -> None:
    """As of a process that waited for the one that failed. Whichever is reported first, the other one is waited for."""
    pair, failed = "roles: {worker: {}}", Finish(False, "TaskFailed", "master-0 ended with exit code 1")
    assert decision(pair, "jax", worker_0=134, failed_s=1.0) == Settle(2.0)
    assert decision(pair, "jax", master_0=1, worker_0=134, failed_s=1.0) == failed
    both = decision("roles: {worker: {replicas: 2}}", "jax", master_0=1, worker_0=134, worker_1=137)
    assert isinstance(both, Restart)
    assert both.why == "worker-1 ended with exit code 137 (SIGKILL), and master-0 ended with exit code 1"
    assert isinstance(decision(pair, "jax", worker_0=134, failed_s=3.0), Restart)
    assert isinstance(decision(pair, "jax", master_0=134, worker_0=134), Restart)


@promise("S-324")
def test_a_collective_that_fails_by_itself_has_failed() -> None:
    """At once if none is left to report anything else, and where a replica starts again alone."""
    pair, failed = "roles: {worker: {}}", Finish(False, "TaskFailed", "master-0 ended with exit code 1")
    assert decision(pair, "pytorch", master_0=1, failed_s=3.0) == failed
    assert decision(pair, "pytorch", master_0=1, worker_0=1, failed_s=0.0) == failed
    assert decision(pair + ", restart: replica", "pytorch", master_0=1, failed_s=0.0) == failed
    alone = decision(pair + ", restart: replica", "pytorch", master_0=1, worker_0=137, failed_s=0.0)
    assert alone == failed


@promise("S-324")
def test_spec_restart_overrides_what_is_restarted() -> None:
    one = decision("roles: {worker: {replicas: 2}}, restart: replica", "pytorch", worker_1=137)
    assert isinstance(one, Restart)
    assert names(one.tasks) == ["worker-1"]
    every = decision(ALL + ", restart: all", worker_1=137)
    assert isinstance(every, Restart)
    assert len(every.tasks) == 5


@promise("S-324")
def test_restarts_are_counted_and_wait_longer_each_time() -> None:
    found = decision(ALL + ", backoffLimit: 2", restarts=2, worker_1=137)
    assert found == Finish(
        False, "BackoffLimitExceeded", "worker-1 ended with exit code 137 (SIGKILL), after 2 restarts"
    )
    one = decision(ALL + ", backoffLimit: 1", restarts=1, worker_1=137)
    assert one == Finish(False, "BackoffLimitExceeded", "worker-1 ended with exit code 137 (SIGKILL), after 1 restart")
    assert [restart_delay_s(count) for count in (0, 1, 2, 5, 6, 1000)] == [1, 2, 4, 32, 60, 60]


def test_the_reason_of_a_kill_is_reported() -> None:
    task = Task(role="worker", index=1)
    killed = TaskState(task=task, state=FAILED, exit_code=137, reason="OOMKilled")
    assert killed.failure == "worker-1 ended with exit code 137 (OOMKilled)"
    for code, told in ((139, "139 (SIGSEGV)"), (255, "255"), (1, "1")):
        failed = TaskState(task=task, state=FAILED, exit_code=code)
        assert failed.failure == f"worker-1 ended with exit code {told}"


@promise("S-325")
def test_a_deadline_fails_the_job_unless_it_has_succeeded() -> None:
    assert decision(ALL + ", activeDeadlineSeconds: 60") == Wait(10.0)
    found = decision(ALL + ", activeDeadlineSeconds: 50")
    assert isinstance(found, Finish)
    assert (found.succeeded, found.reason) == (False, "DeadlineExceeded")
    late = decision("activeDeadlineSeconds: 50", master_0=0)
    assert isinstance(late, Finish)
    assert late.succeeded
