"""`datastore model verify NAME[:VERSION|ALIAS]`."""

from __future__ import annotations

import time

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, fail, note, print_json
from datastore.cli.exitcodes import ExitCode
from datastore.cli.model.places import File, Store, open_store
from datastore.cli.model.show import Reference
from datastore.cli.model.work import ProgressOption, Shown, run
from datastore.models.names import parse_reference
from datastore.models.verifying import verify
from datastore.units import format_count, format_size


def verify_command(
    reference: Reference,
    file: File = None,
    store: Store = None,
    progress: ProgressOption = Shown.AUTO,
    output: Output = Format.TABLE,
) -> None:
    """Read every byte of a version again, and report every difference from what was saved."""
    asked = parse_reference(reference)
    began = time.monotonic()
    with open_store(file, store) as opened:
        models = opened.models
        number = models.resolve(asked)
        manifest, damages = run(lambda told: verify(models, asked.model, number, told), progress)
    name = f"{asked.model}:{number}"
    if output is Format.JSON:
        print_json({"model": asked.model, "version": number, "digest": manifest.digest, "damages": damages})
    elif not damages:
        held = f"{format_count(manifest.files, 'file')}, {format_size(manifest.size_bytes)}"
        note(f"{name} is as it was saved: {held}, read in {time.monotonic() - began:.1f} s")
    for damage in damages if output is not Format.JSON else ():
        fail(damage)
    if damages:
        raise typer.Exit(ExitCode.ERROR)
