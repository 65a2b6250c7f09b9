"""Arguments and options that many verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.console import Format
from datastore.cli.inspection import complete_mounted

Target = Annotated[
    str,
    typer.Argument(
        metavar="DIR|NAME", help="Directory or name of a mounted Datastore.", autocompletion=complete_mounted
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Format of the output.")]
