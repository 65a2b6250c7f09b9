"""The progress bar of commands that move many files."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from datastore.cli.console import diagnostics


def bar(*before: ProgressColumn, shown: bool = True) -> Progress:
    """Return a bar on standard error, hidden unless that is a terminal. A task has the fields `files` and `size`."""
    console = diagnostics()
    fields = (TextColumn("{task.fields[files]}"), TextColumn("{task.fields[size]}"))
    columns = (*before, BarColumn(), *fields, TextColumn("ETA"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
