"""`datastore job top NAME`: what each replica uses, shown after each interval until Ctrl-C."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note
from datastore.cli.job.drivers import DEFAULT, Name, Namespace
from datastore.cli.job.shown import TOP, top_row
from datastore.cli.live import LiveTable, waited_out
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
    told: set[str] = set()
    with watching() as watch, ExitStack() as stack:
        table = LiveTable(TOP, ("REPLICA",), top_row, output, once, stack)
        while True:
            seen = list(driver.metrics(name, namespace))
            if not seen and not once:
                note(f"nothing of {name} runs")
                return
            for why in {str(each["why"]) for each in seen if "why" in each} - told:
                told.add(why)
                if not table.in_place:
                    note(why)
            table.show(seen)
            if once or waited_out(watch, interval):
                return
