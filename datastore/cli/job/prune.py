"""`datastore job prune --since 7d`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from datastore.cli.arguments import Output, seconds_of
from datastore.cli.console import Format, note, print_json
from datastore.cli.job.drivers import DEFAULT, AllNamespaces, InNamespace, everywhere

_DAYS = re.compile(r"([0-9]+)d")


def prune_command(
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Delete the jobs that finished longer ago than this: 7d, 12h, 30m, 0s for all finished ones.",
        ),
    ],
    namespace: InNamespace = DEFAULT,
    all_namespaces: AllNamespaces = False,
    output: Output = Format.TABLE,
) -> None:
    """Delete the TrainingJobs that finished longer ago than --since says. Running jobs are left alone."""
    oldest = datetime.now(UTC) - timedelta(seconds=_seconds(since))
    gone = []
    for driver, each in everywhere(namespace, all_namespaces):
        end = each.status.completion_time
        if each.finished and end is not None and end <= oldest:
            for text in driver.delete(each.job.name, each.job.namespace):
                note(text)
            gone.append({"name": each.job.name, "namespace": each.job.namespace})
    if output is Format.JSON:
        print_json(gone)
    else:
        note(f"{len(gone)} deleted{': ' if gone else ''}{', '.join(each['name'] for each in gone)}")


def _seconds(text: str) -> float:
    if found := _DAYS.fullmatch(text):
        return float(found[1]) * 86_400
    return seconds_of("--since", text)
