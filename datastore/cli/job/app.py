"""All verbs of `datastore job`."""

from __future__ import annotations

import typer

from datastore.cli.job import convert, delete, free, get, list_, logs, prune, submit, suspend, tensorboard, top

app = typer.Typer(name="job", help="Run, inspect and stop TrainingJobs.", no_args_is_help=True)
app.command("submit")(submit.submit_command)
app.command("list")(list_.list_command)
app.command("get")(get.get_command)
app.command("logs")(logs.logs_command)
app.command("top")(top.top_command)
app.command("free")(free.free_command)
app.command("suspend")(suspend.suspend_command)
app.command("resume")(suspend.resume_command)
app.command("delete")(delete.delete_command)
app.command("prune")(prune.prune_command)
app.command("tensorboard")(tensorboard.tensorboard_command)
app.command("convert")(convert.convert_command)
