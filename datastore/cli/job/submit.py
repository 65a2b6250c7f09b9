"""`datastore job submit -f FILE [NAME]`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.api.manifest import load
from datastore.api.trainingjob import KIND
from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, print_json
from datastore.cli.exitcodes import ExitCode
from datastore.cli.job.drivers import as_json, for_new
from datastore.cli.job.following import Detached, follow
from datastore.mounting.signals import watching


def submit_command(
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="FILE", help="YAML file with the TrainingJob and its Datastores.")
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the TrainingJob; needed if the file holds several.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run the job on this machine, with this machine's programs.")
    ] = False,
    container: Annotated[
        bool, typer.Option("--container", help="Run the job's image on this machine, by podman or docker.")
    ] = False,
    follow_it: Annotated[
        bool, typer.Option("--follow", help="Keep running, and show logs and states until the job has finished.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Start a TrainingJob, in the cluster of kubectl's context or on this machine. It continues without this terminal.

    With --follow the exit code is 0 if the job succeeds, and its result is saved if spec.save says so, else 1.
    Ctrl-C then ends this command, not the job.
    """
    manifest = load(file, KIND)
    job = manifest.pick_job(name)
    if follow_it and job.spec.schedule is not None:
        raise typer.BadParameter(
            f"TrainingJob {job.name} has a schedule, and each of its runs is a job of its own: submit it without "
            f"--follow; `datastore job get {job.name}` then names its last run, which `datastore job logs -f` shows"
        )
    driver = for_new(local, container)
    observed = driver.create(job, manifest)
    namespace = observed.job.namespace
    for each in driver.notes(job.name, namespace):
        note(each)
    if not follow_it:
        shows = f"logs -f {job.name}` shows what it writes"
        if job.spec.schedule is not None:
            shows = f"get {job.name}` shows its runs, each of which is a job of its own"
        note(f"{job.name} is submitted ({observed.where}): `datastore job {shows}")
    else:
        with watching() as watch:
            try:
                observed = follow(driver, job.name, namespace, watch)
            except Detached:
                note(f"{job.name} continues; `datastore job suspend {job.name}` stops it, `delete` ends and forgets it")
                raise typer.Exit(ExitCode.INTERRUPTED) from None
        note(f"{job.name}: {observed.status.phase}: {observed.status.message}")
        if observed.status.freed_seconds is not None:
            note(f"everything was freed {observed.status.freed_seconds:.2f} s after its end")
    if output is Format.JSON:
        print_json(as_json(observed, driver.notes(job.name, namespace)))
    unsaved = any(each.type == "Saved" and each.status == "False" for each in observed.status.conditions or [])
    if follow_it and (observed.status.phase != "Succeeded" or unsaved):
        raise typer.Exit(ExitCode.ERROR)
