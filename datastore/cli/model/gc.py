"""`datastore model gc [NAME]`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from datastore.cli.arguments import seconds_of
from datastore.cli.console import note
from datastore.cli.model.places import File, Store, open_store
from datastore.models.names import check_model
from datastore.models.registry import STALE_S
from datastore.units import format_count, format_duration


def gc_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Check only this model. Default: all models.")
    ] = None,
    file: File = None,
    store: Store = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what is found. Without this option it is only listed.")
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Time for which a save on another machine must have been silent to count as interrupted.",
        ),
    ] = format_duration(STALE_S),
) -> None:
    """Find what interrupted saves and deletions left in the store, and remove it with --delete."""
    stale_s = seconds_of("--older-than", older_than)
    found = removed = 0
    with open_store(file, store, to_write=delete) as opened:
        models = opened.models
        for model in [check_model(name)] if name else models.names():
            for garbage in models.garbage(model, stale_s):
                found += 1
                sys.stdout.write(f"{model}/{garbage.number}  {garbage.why}\n")
                removed += models.remove_garbage(garbage) if delete else 0
            removed += models.sweep(model) if delete else 0
    if delete:
        note(f"{format_count(removed, 'file')} removed")
    else:
        note("nothing to remove" if not found else "nothing was removed; gc --delete does it")
