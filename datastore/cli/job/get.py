"""`datastore job get NAME`."""

from __future__ import annotations

import sys

from datastore.cli.arguments import Output
from datastore.cli.console import Format, one_line, print_columns, print_json
from datastore.cli.job.drivers import DEFAULT, Name, Namespace, as_json
from datastore.cli.job.shown import REPLICAS, duration, replica_row
from datastore.training.launchers import existing


def get_command(name: Name, namespace: Namespace = DEFAULT, output: Output = Format.TABLE) -> None:
    """Show a TrainingJob: its state, and for each replica its state, how it ended and what it used."""
    driver, namespace = existing(name, namespace)
    observed = driver.observe(name, namespace)
    notes = driver.notes(name, namespace)
    if output is Format.JSON:
        print_json(as_json(observed, notes))
        return
    status = observed.status
    facts = {
        "framework": observed.job.spec.framework,
        "phase": status.phase,
        "message": status.message,
        "duration": duration(status.start_time, status.completion_time),
        "restarts": status.restarts,
        "freed after": None if status.freed_seconds is None else f"{status.freed_seconds:.2f} s",
        "tensorboard": status.tensorboard,
        "last run": status.last_run,
        "next run": status.next_run and f"{status.next_run:%Y-%m-%d %H:%M} UTC",
        "datastores": ", ".join(f"{each.name} at {each.path}" for each in observed.job.spec.datastores),
        **{f"note {number}": text for number, text in enumerate(notes, start=1)},
    }
    sys.stdout.write(f"{name}\n")
    for key, value in facts.items():
        if value not in (None, "", "-"):
            sys.stdout.write(f"  {key}: {one_line(str(value))}\n")
    for condition in status.conditions or []:
        what = f"{condition.type}={condition.status} {condition.reason} {condition.message}"
        sys.stdout.write(f"  condition: {one_line(what)}\n")
    if observed.evidence.replicas:
        sys.stdout.write("\n")
        print_columns(REPLICAS, [replica_row(each) for each in observed.evidence.replicas])
