"""`datastore job free NAME`."""

from __future__ import annotations

import sys

from datastore.cli.arguments import Output
from datastore.cli.console import Format, print_json
from datastore.cli.job.drivers import DEFAULT, Name, Namespace
from datastore.training.launchers import existing


def free_command(name: Name, namespace: Namespace = DEFAULT, output: Output = Format.TABLE) -> None:
    """End all processes of a TrainingJob at once. The job, its logs and its figures stay."""
    driver, namespace = existing(name, namespace)
    seconds = driver.free(name, namespace)
    if output is Format.JSON:
        print_json({"name": name, "namespace": namespace, "seconds": round(seconds, 3)})
    else:
        sys.stdout.write(f"{name}: nothing of it runs any more, after {seconds:.2f} s\n")
