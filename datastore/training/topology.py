"""The tasks of a TrainingJob, their ranks, their GPUs and their addresses. Pure.

A *task* is one replica of one role. Its *rank*, for collective operations, counts the master first, then the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datastore.api.trainingjob import ROLES, RoleName, TrainingJobSpec, replicas_of, role_of

RANKED: tuple[RoleName, ...] = ("master", "worker")
"""The roles whose tasks have a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where other tasks reach a task: its host, and the port that is set aside for it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Task:
    """One replica: its role, its index in the role, and how many GPUs it has."""

    role: RoleName
    index: int
    gpus: int = 0

    @property
    def name(self) -> str:
        """The task's name, such as 'worker-0'. The names of its pod, log and cgroup are made from it."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All tasks of one job, by role as in ROLES, and the address of each, in the same order. one_host: the tasks share
    a host and its loopback interface, as on a laptop."""

    job: str
    tasks: tuple[Task, ...]
    addresses: tuple[Address, ...]
    one_host: bool = False

    def of(self, role: RoleName) -> list[Task]:
        """Return the tasks of a role, by index."""
        return [task for task in self.tasks if task.role == role]

    def address(self, task: Task) -> Address:
        return self.addresses[self.tasks.index(task)]

    def hosts(self, role: RoleName) -> list[str]:
        """Return 'host:port' of each task of a role."""
        return [str(self.address(task)) for task in self.of(role)]

    @property
    def ranked(self) -> list[Task]:
        """The master and the workers, by rank."""
        return [*self.of("master"), *self.of("worker")]

    @property
    def chief(self) -> Task:
        """The task with rank 0: the master, or worker 0 in a job without a master."""
        return self.ranked[0]

    def first_rank(self, role: RoleName) -> int:
        """Return the rank of a role's first task, to which a task's index is added; 0 for roles without ranks."""
        return len(self.of("master")) if role == "worker" else 0


def split_gpus(gpus: int, per_task: int) -> list[int]:
    """Return each task's GPUs: (100, 8) gives [4, 8, 8, ...], 13 tasks. The rest is first, so all workers are alike."""
    rest = gpus % per_task
    return ([rest] if rest else []) + [per_task] * (gpus // per_task)


def tasks_of(spec: TrainingJobSpec) -> tuple[Task, ...]:
    """Return the tasks of a job, by role as in ROLES and by index."""
    shares: list[int] = []
    if spec.gpus is not None and spec.gpus_per_task is not None:
        shares = split_gpus(spec.gpus, spec.gpus_per_task)
    found = []
    for role in ROLES:
        for index in range(replicas_of(spec, role)):
            own = role_of(spec, role).gpus or 0
            found.append(Task(role=role, index=index, gpus=shares.pop(0) if shares and role in RANKED else own))
    return tuple(found)


def topology_of(
    job: str, spec: TrainingJobSpec, address: Callable[[Task], Address], *, one_host: bool = False
) -> Topology:
    """Return the topology of a job. address: returns the address of a task, as its driver chooses it."""
    tasks = tasks_of(spec)
    return Topology(job=job, tasks=tasks, addresses=tuple(address(task) for task in tasks), one_host=one_host)
