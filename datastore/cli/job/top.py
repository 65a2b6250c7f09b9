"""`datastore job top NAME`: what each replica uses, shown after each interval until Ctrl-C."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, print_columns, print_json
from datastore.cli.job.drivers import DEFAULT, Name, Namespace
from datastore.cli.job.shown import TOP, top_row
from datastore.mounting.signals import watching
from datastore.training.launchers import existing


def top_command(
    name: Name,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and exit.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=3600, help="Seconds between two measurements.")
    ] = 2.0,
    namespace: Namespace = DEFAULT,
    output: Output = Format.TABLE,
) -> None:
    """Show the CPU, memory, network and GPU use of each running replica, until Ctrl-C."""
    driver, namespace = existing(name, namespace)
    live: Live | None = None
    told: set[str] = set()
    with watching() as watch:
        try:
            while True:
                seen = list(driver.metrics(name, namespace))
                if not seen and not once:
                    note(f"nothing of {name} runs")
                    return
                for why in {str(each["why"]) for each in seen if "why" in each} - told:
                    told.add(why)
                    if once or not sys.stdout.isatty():
                        note(why)
                if sys.stdout.isatty() and not once and output is Format.TABLE:
                    live = live or _started()
                    live.update(_table(seen), refresh=True)
                else:
                    _print(seen, output, once)
                if once:
                    return
                watch.wait([], interval)
                if watch.take() is not None:
                    return
        finally:
            if live:
                live.stop()


def _started() -> Live:
    live = Live(Table(), console=Console(), auto_refresh=False)
    live.start()
    return live


def _print(seen: list[dict[str, Any]], output: Format, once: bool) -> None:
    if output is not Format.JSON:
        print_columns(TOP, [top_row(each) for each in seen])
    elif once:
        print_json(seen)
    else:
        sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


def _table(seen: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in TOP:
        table.add_column(name, justify="left" if name == "REPLICA" else "right", no_wrap=True)
    for each in seen:
        table.add_row(*(Text(cell) for cell in top_row(each)))
    return table
