"""What a framework is to a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from datastore.api.trainingjob import RoleName
from datastore.training.topology import Topology

INDEX = "$(DATASTORE_INDEX)"
RANK = "$(DATASTORE_RANK)"
FILES = "/run/datastore"
"""Directory of a framework's files, as the processes see it."""


def no_files(topology: Topology) -> dict[str, str]:
    """A framework that needs none."""
    return {}


def as_given(topology: Topology, role: RoleName, command: Sequence[str]) -> list[str]:
    """A framework in which every task runs the user's command."""
    return list(command)


def always_all(topology: Topology) -> Literal["replica", "all"]:
    """A collective: none can go on without the others."""
    return "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework. All functions are pure.

    roles: those it has. environment: variables of the tasks of a role. success and restart: the policies where the job
    says nothing. files: name -> text, below FILES. command: what a task of a role runs in place of the user's command.
    needs_token: every task gets the same random DATASTORE_TOKEN. needs_master: worker 0 can't do the master's part.
    """

    name: str
    environment: Callable[[Topology, RoleName], Mapping[str, str]]
    roles: tuple[RoleName, ...] = ("master", "worker")
    success: Literal["chief", "allWorkers"] = "allWorkers"
    restart: Callable[[Topology], Literal["replica", "all"]] = always_all
    files: Callable[[Topology], Mapping[str, str]] = no_files
    command: Callable[[Topology, RoleName, Sequence[str]], list[str]] = as_given
    needs_token: bool = False
    needs_master: bool = False
