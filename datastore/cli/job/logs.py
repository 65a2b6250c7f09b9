"""`datastore job logs NAME [-f] [--tail N] [--role ROLE] [--index N]`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from datastore.api.trainingjob import RoleName
from datastore.cli.console import note
from datastore.cli.job.drivers import DEFAULT, Name, Namespace
from datastore.cli.job.following import print_line
from datastore.training.launchers import existing


def logs_command(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has finished.")] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", min=0, help="Print only this many last lines of each replica, and new lines with -f."),
    ] = None,
    role: Annotated[RoleName | None, typer.Option("--role", help="Print only the logs of this role.")] = None,
    index: Annotated[
        int | None, typer.Option("--index", min=0, help="Print only the log of the replica with this index.")
    ] = None,
    namespace: Namespace = DEFAULT,
) -> None:
    """Print the logs of a TrainingJob's replicas, while it runs or afterwards."""
    driver, namespace = existing(name, namespace, note)
    observed = driver.observe(name, namespace)
    if observed.status.phase in (None, "Pending"):
        note(f"{name} does not run yet{f': {why}' if (why := observed.status.message) else ''}")
    alone = len(observed.evidence.replicas) == 1 or (role is not None and index is not None)
    for line in driver.logs(name, namespace, role, index, follow=follow, tail=tail):
        print_line(line, alone)
        if follow:
            sys.stdout.flush()
