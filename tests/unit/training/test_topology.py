"""datastore.training.topology: who takes part, with how many GPUs (S-321)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.training.topology import split_gpus, tasks_of
from tests.promises import promise
from tests.unit.training.jobs import in_a_cluster, job


@promise("S-321")
def test_100_gpus_by_8_are_12_tasks_of_8_and_one_of_4() -> None:
    tasks = tasks_of(job("gpus: 100, gpusPerTask: 8").spec)
    assert [(task.name, task.gpus) for task in tasks] == [
        ("master-0", 4),
        *((f"worker-{index}", 8) for index in range(12)),
    ]


@promise("S-321")
@given(st.integers(1, 9999), st.integers(1, 64))
def test_a_split_gives_out_every_gpu_and_only_the_first_task_differs(gpus: int, per_task: int) -> None:
    split = split_gpus(gpus, per_task)
    assert sum(split) == gpus
    assert all(0 < each <= per_task for each in split)
    assert set(split[1:]) <= {per_task}


@promise("S-321")
@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("", ["master-0"]),
        (
            "roles: {worker: {replicas: 2}, ps: {}, evaluator: {}}",
            ["master-0", "ps-0", "worker-0", "worker-1", "evaluator-0"],
        ),
        ("roles: {master: {replicas: 0}, worker: {replicas: 2}}", ["worker-0", "worker-1"]),
    ],
)
def test_the_tasks_of_a_job(spec: str, names: list[str]) -> None:
    assert [task.name for task in tasks_of(job(spec).spec)] == names


def test_master_and_workers_have_ranks_the_master_first() -> None:
    topology = in_a_cluster(job("roles: {worker: {replicas: 2}, ps: {}}"))
    assert [task.name for task in topology.ranked] == ["master-0", "worker-0", "worker-1"]
    assert (topology.first_rank("master"), topology.first_rank("worker")) == (0, 1)
    without = in_a_cluster(job("roles: {master: {replicas: 0}, worker: {replicas: 2}}"))
    assert without.chief.name == "worker-0"
    assert without.first_rank("worker") == 0


def test_the_gpus_of_a_role_are_those_of_each_replica() -> None:
    tasks = tasks_of(job("roles: {worker: {replicas: 2, gpus: 3}, ps: {}}").spec)
    assert [task.gpus for task in tasks] == [0, 0, 3, 3]
