"""`datastore top`: what all mounts do, shown after each interval until Ctrl-C."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from datastore.cli.arguments import Output
from datastore.cli.console import Format, one_line, print_columns, print_json
from datastore.cli.inspection import inspect
from datastore.cli.rates import COLUMNS, cells, rates
from datastore.mounting.records import all_records
from datastore.mounting.signals import SignalWatch, watching

_RIGHT = {"OPS/s", "READ/s", "WRITE/s", "HITS", "ERRORS", "P50", "P99", "RSS"}


def top_command(
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval and exit.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.1, max=3600, help="Length of an interval in seconds.")
    ] = 2.0,
    output: Output = Format.TABLE,
) -> None:
    """Show live what the mounts are doing, until Ctrl-C. With -o json, print one line of JSON for each interval."""
    with watching() as watch, ExitStack() as stack:
        show = _printer(output, once, stack)
        before, looked_at = _look(), time.monotonic()
        while not _waited_out(watch, interval):
            after, now = _look(), time.monotonic()
            show([rates(before.get(key), seen, now - looked_at) for key, seen in after.items()])
            if once:
                return
            before, looked_at = after, now


def _look() -> dict[str, dict[str, Any]]:
    return {str(record.state_dir): inspect(record) for record in all_records()}


def _waited_out(watch: SignalWatch, seconds: float) -> bool:
    """Wait for the interval; return True at once when a signal comes, which ends the command."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        watch.wait([], left_s)
        if watch.take() is not None:
            return True
    return False


def _printer(output: Format, once: bool, stack: ExitStack) -> Callable[[list[dict[str, Any]]], None]:
    """Return the function that shows a list of rows: by a live table on a terminal, else by lines."""
    if output is Format.JSON:
        return print_json if once else _print_line
    if once or not sys.stdout.isatty():
        return _print_table
    live = stack.enter_context(Live(_table([]), console=Console(), auto_refresh=False, transient=False))
    return lambda rows: live.update(_table(rows), refresh=True)


def _print_line(rows: list[dict[str, Any]]) -> None:
    sys.stdout.write(json.dumps(rows) + "\n")
    sys.stdout.flush()


def _print_table(rows: list[dict[str, Any]]) -> None:
    print_columns(COLUMNS, [cells(row) for row in rows])
    sys.stdout.flush()


def _table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name != "MOUNTPOINT")
    for row in rows:
        # Text, so that rich does not take brackets in a name for markup.
        table.add_row(*(Text(one_line(cell)) for cell in cells(row)))
    return table
