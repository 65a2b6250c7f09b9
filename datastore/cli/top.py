"""`datastore top`: what all mounts do, shown after each interval until Ctrl-C."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note
from datastore.cli.inspection import NONE_MOUNTED, inspect
from datastore.cli.live import LiveTable, waited_out
from datastore.cli.rates import COLUMNS, cells, rates
from datastore.mounting.records import all_records
from datastore.mounting.signals import watching

_LEFT = ("NAME", "MOUNTPOINT", "UNSENT", "STATE")


def top_command(
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval and exit.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.1, max=3600, help="Length of an interval in seconds.")
    ] = 2.0,
    output: Output = Format.TABLE,
) -> None:
    """Show live what the mounts are doing, until Ctrl-C. With -o json, print one line of JSON for each interval."""
    with watching() as watch, ExitStack() as stack:
        table = LiveTable(COLUMNS, _LEFT, cells, output, once, stack)
        before, looked_at = _look(), time.monotonic()
        if not before:
            note(NONE_MOUNTED)
        while not waited_out(watch, interval):
            after, now = _look(), time.monotonic()
            table.show([rates(before.get(key), seen, now - looked_at) for key, seen in after.items()])
            if once:
                return
            before, looked_at = after, now


def _look() -> dict[str, dict[str, Any]]:
    return {str(record.state_dir): inspect(record) for record in all_records()}
