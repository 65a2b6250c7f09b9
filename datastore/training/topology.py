"""Who takes part in a training: the tasks of a TrainingJob, their ranks, their GPUs and their addresses. Pure.

A *task* is one replica of one role. Its *rank* counts master and workers, the master first: what collectives number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datastore.api.trainingjob import ROLES, RoleName, TrainingJobSpec, replicas_of, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the others reach a task: its host and one port, which is the task's own."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Task:
    """One replica: role, index in it, and how many GPUs it has."""

    role: RoleName
    index: int
    gpus: int = 0

    @property
    def name(self) -> str:
        """'worker-0': with the job's name before it, the name of its pod, log and cgroup."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All tasks of one job, by role as in ROLES, with the address of each.

    one_host: they share a host and its loopback interface, as on a laptop.
    """

    job: str
    tasks: tuple[Task, ...]
    addresses: tuple[Address, ...]
    one_host: bool = False

    def of(self, role: RoleName) -> list[Task]:
        """The tasks of a role, by index."""
        return [task for task in self.tasks if task.role == role]

    def address(self, task: Task) -> Address:
        """Where the task is."""
        return self.addresses[self.tasks.index(task)]

    def hosts(self, role: RoleName) -> list[str]:
        """'host:port' of each task of a role."""
        return [str(self.address(task)) for task in self.of(role)]

    @property
    def ranked(self) -> list[Task]:
        """Master and workers by rank."""
        return [*self.of("master"), *self.of("worker")]

    @property
    def chief(self) -> Task:
        """The master, else worker 0: rank 0."""
        return self.ranked[0]

    def first_rank(self, role: RoleName) -> int:
        """Rank of index 0 of a role: with it, rank is first_rank + index. 0 for roles without ranks."""
        return len(self.of("master")) if role == "worker" else 0


def split_gpus(gpus: int, per_task: int) -> list[int]:
    """GPUs of each task: (100, 8) -> [4, 8, 8, ...], 13 in all. The rest comes first, so that all workers are alike."""
    rest = gpus % per_task
    return ([rest] if rest else []) + [per_task] * (gpus // per_task)


def tasks_of(spec: TrainingJobSpec) -> tuple[Task, ...]:
    """The tasks of a job, by role as in ROLES and by index."""
    shares: list[int] = []
    if spec.gpus is not None and spec.gpus_per_task is not None:
        shares = split_gpus(spec.gpus, spec.gpus_per_task)
    found = []
    for role in ROLES:
        for index in range(replicas_of(spec, role)):
            own = role_of(spec, role).gpus or 0
            found.append(Task(role=role, index=index, gpus=shares.pop(0) if shares and _ranked(role) else own))
    return tuple(found)


def topology_of(
    job: str, spec: TrainingJobSpec, address: Callable[[Task], Address], *, one_host: bool = False
) -> Topology:
    """The topology of a job whose driver says where each task is."""
    tasks = tasks_of(spec)
    return Topology(job=job, tasks=tasks, addresses=tuple(address(task) for task in tasks), one_host=one_host)


def _ranked(role: RoleName) -> bool:
    return role in ("master", "worker")
