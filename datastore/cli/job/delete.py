"""`datastore job delete NAME ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, fail, note, print_json
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.job.drivers import DEFAULT, Namespace, complete_jobs
from datastore.errors import DatastoreError
from datastore.mounting.errors import Unsynced
from datastore.training.launchers import existing


def delete_command(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Names of the TrainingJobs.", autocompletion=complete_jobs)
    ],
    namespace: Namespace = DEFAULT,
    output: Output = Format.TABLE,
) -> None:
    """End TrainingJobs and delete them with their logs. What they wrote to their Datastores stays.

    If one can't be deleted, the others are; the exit code is that of the first error.
    """
    gone = []
    code = ExitCode.OK
    for name in names:
        try:
            driver, space = existing(name, namespace, note)
            left = driver.delete(name, space)
            note(f"{name} is deleted")
            gone.append({"name": name, "namespace": space})
            if left:
                raise Unsynced("; ".join(left))
        except DatastoreError as error:
            fail(str(error))
            code = code or exit_code_for(error)
    if output is Format.JSON:
        print_json(gone)
    raise typer.Exit(code)
