"""The launchers that a verb works with, and the arguments that the verbs share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datastore.cli.console import note
from datastore.errors import DatastoreError
from datastore.training.driver import Observed
from datastore.training.launchers import Launcher, of_cluster
from datastore.training.local.driver import LocalDriver
from datastore.training.local.records import all_directories


def complete_jobs(incomplete: str) -> list[str]:
    """Return the names of this machine's jobs, for shell completion."""
    return sorted({each.name for each in all_directories() if each.name.startswith(incomplete)})


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the TrainingJob.", autocompletion=complete_jobs)]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace of the job. Default: on this machine `default`, in a cluster that of kubectl's context.",
    ),
]
DEFAULT = ""
InNamespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        help="Only jobs of this namespace. Default: all on this machine, and that of kubectl's context in the cluster.",
    ),
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces of the cluster.")]


def for_new(local: bool, container: bool) -> Launcher:
    """Return the launcher of a new job: this machine, or the cluster of kubectl's context. Errors: DatastoreError."""
    if local or container:
        return LocalDriver(container=container)
    try:
        return of_cluster()
    except DatastoreError as error:
        raise DatastoreError(
            f"{error}; to run it on this machine add --local (or --container, for its image)"
        ) from None


def everywhere(namespace: str, all_namespaces: bool) -> list[tuple[Launcher, Observed]]:
    """Return the jobs with their launchers, this machine's first. Print a note if the cluster can't be asked."""
    local = LocalDriver(say=note)
    found: list[tuple[Launcher, Observed]]
    found = [(local, each) for each in local.observe_all(namespace or None)]
    try:
        cluster = of_cluster()
    except DatastoreError:
        return found  # no cluster is configured
    asked = None if all_namespaces else namespace or cluster.client.namespace
    try:
        return found + [(cluster, each) for each in cluster.observe_all(asked)]
    except DatastoreError as error:
        note(f"the jobs of the cluster are left out: {error}")
        return found


def as_json(observed: Observed, notes: list[str] | None = None) -> dict[str, Any]:
    """Return a job for programs: the object as a cluster has it, with `where`, `evidence` and `notes` added."""
    job = observed.job.model_dump(by_alias=True, exclude_unset=True, mode="json")
    job["status"] = observed.status.model_dump(by_alias=True, exclude_none=True, mode="json")
    evidence = observed.evidence.model_dump(by_alias=True, exclude_none=True, mode="json")
    return {**job, "where": observed.where, "evidence": evidence, **({"notes": notes} if notes else {})}
