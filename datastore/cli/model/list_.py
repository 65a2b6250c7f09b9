"""`datastore model list [NAME]`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, print_columns, print_json
from datastore.cli.model.places import File, Store, open_store
from datastore.cli.model.show import document_of
from datastore.models.errors import ModelNotFound
from datastore.models.names import check_model
from datastore.models.registry import Models
from datastore.units import format_size

_DIGEST_CHARACTERS = len("sha256:") + 12


def list_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="List the versions of this model. Default: list the models.")
    ] = None,
    file: File = None,
    store: Store = None,
    output: Output = Format.TABLE,
) -> None:
    """List the models of a store, or the versions of one model, the newest first; damaged ones are marked."""
    if name is not None:
        check_model(name)
    with open_store(file, store) as opened:
        found = _models(opened.models) if name is None else _versions(opened.models, name)
        where = opened.models.storage.location
    if output is Format.JSON:
        print_json(found)
    else:
        first = "MODEL" if name is None else "VERSION"
        print_columns(
            (first, *(() if name else ("NEWEST",)), "ALIASES", "FILES", "SIZE", "SAVED", "DIGEST"),
            [_row(each, named=name is None) for each in found],
            if_empty=f"{where} has no model yet; save one with `datastore model save NAME --from SOURCE`",
        )
    for each in found:
        if "damage" in each:
            note(each["damage"])


def _models(models: Models) -> list[dict[str, Any]]:
    found = []
    for name in models.names():
        newest = next(models.versions(name), None)
        if newest is not None:
            found.append({**document_of(newest), "aliases": _aliases(models, name)})
    return found


def _versions(models: Models, name: str) -> list[dict[str, Any]]:
    aliases = _aliases(models, name)
    found = [
        {**document_of(each), "aliases": {alias: at for alias, at in aliases.items() if at == each.version}}
        for each in models.versions(name)
    ]
    if not found:
        raise ModelNotFound(f"{models.storage.location} has no version of a model {name}")
    return found


def _aliases(models: Models, name: str) -> dict[str, int]:
    """Return the aliases of a model, 0 for a damaged one; say how to repair it."""
    aliases = models.aliases(name)
    for alias in [alias for alias, at in aliases.items() if not at]:
        note(
            f"the alias {alias} of {name} is damaged: it holds no number; move it (`model tag {name}:VERSION {alias}`) "
            f"or remove it (`model tag {name} {alias} --remove`)"
        )
    return aliases


def _row(found: dict[str, Any], *, named: bool) -> list[str]:
    aliases = ", ".join(f"{alias}={at or 'damaged'}" if named else alias for alias, at in found["aliases"].items())
    named_by = [*([found["model"]] if named else []), str(found["version"]), aliases]
    if "damage" in found:
        return [*named_by, "", "", "", "damaged"]
    return [
        *named_by,
        f"{found['files']:,}",
        format_size(found["bytes"]),
        found["saved"],
        found["digest"][:_DIGEST_CHARACTERS],
    ]
