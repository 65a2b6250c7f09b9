"""`datastore model delete NAME:VERSION`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.console import note
from datastore.cli.model.places import File, Store, open_store
from datastore.models.names import parse_reference
from datastore.units import format_count


def delete_command(
    reference: Annotated[
        str, typer.Argument(metavar="NAME:VERSION", help="Name of the model, and number of the version.")
    ],
    file: File = None,
    store: Store = None,
) -> None:
    """Delete a version permanently. Refused while an alias names it or it is served. Its number is not used again."""
    asked = parse_reference(reference)
    if asked.version is None:
        raise typer.BadParameter(f"{reference}: say which version is deleted by its number, such as {asked.model}:1")
    with open_store(file, store, to_write=True) as opened:
        removed = opened.models.delete(asked.model, asked.version)
    note(f"{asked} is deleted ({format_count(removed, 'file')})")
