"""Arguments and options that many verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.console import Format
from datastore.cli.inspection import complete_mounted
from datastore.units import parse_duration

Target = Annotated[
    str,
    typer.Argument(
        metavar="DIR|NAME", help="Directory or name of a mounted Datastore.", autocompletion=complete_mounted
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Format of the output.")]


def seconds_of(option: str, text: str) -> float:
    """Return the seconds that the text of an option says. Errors: typer.BadParameter."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
