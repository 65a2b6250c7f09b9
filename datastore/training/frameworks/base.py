"""The interface of a framework for launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from datastore.api.trainingjob import RoleName
from datastore.training.topology import Topology

INDEX = "$(DATASTORE_INDEX)"
RANK = "$(DATASTORE_RANK)"
FILES = "/run/datastore"
"""The directory of a framework's files, as the processes see it."""


def no_files(topology: Topology) -> dict[str, str]:
    """Return {}, for a framework that needs no files."""
    return {}


def as_given(topology: Topology, role: RoleName, command: Sequence[str]) -> list[str]:
    """Return the user's command, for a framework in which every task runs it."""
    return list(command)


def always_all(topology: Topology) -> Literal["replica", "all"]:
    """Return "all", for a framework in which no task can continue without the others."""
    return "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework; all its functions are pure. roles: the roles that a job may have. environment: returns the
    variables of a role's tasks. success, restart: the policies of jobs that don't set them. files: returns the texts of
    files in FILES, by name. command: returns what a role's tasks run, from the user's command. needs_token: all tasks
    get the same random DATASTORE_TOKEN. needs_master: worker 0 can't do the master's part."""

    name: str
    environment: Callable[[Topology, RoleName], Mapping[str, str]]
    roles: tuple[RoleName, ...] = ("master", "worker")
    success: Literal["chief", "allWorkers"] = "allWorkers"
    restart: Callable[[Topology], Literal["replica", "all"]] = always_all
    files: Callable[[Topology], Mapping[str, str]] = no_files
    command: Callable[[Topology, RoleName, Sequence[str]], list[str]] = as_given
    needs_token: bool = False
    needs_master: bool = False
