"""`datastore model show NAME[:VERSION|ALIAS]`."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Annotated, Any

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, one_line, print_columns, print_json
from datastore.cli.model.places import File, Store, open_store
from datastore.models.manifest import Entry, Lineage, VersionManifest
from datastore.models.names import parse_reference
from datastore.units import format_size

Reference = Annotated[
    str,
    typer.Argument(
        metavar="NAME[:VERSION|ALIAS]",
        help="Name of the model, and number or alias of the version. Default: the newest version.",
    ),
]


def show_command(
    reference: Reference,
    file: File = None,
    store: Store = None,
    files: Annotated[bool, typer.Option("--files", help="Also show every file, directory and link.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show a version: its content, its origin, and its aliases."""
    asked = parse_reference(reference)
    with open_store(file, store) as opened:
        models = opened.models
        number = models.resolve(asked)
        manifest = models.manifest(asked.model, number) if files else models.head(asked.model, number)
        aliases = [name for name, version in models.aliases(asked.model).items() if version == number]
    if output is Format.JSON:
        print_json({**document_of(manifest), "aliases": aliases})
        return
    rows = [
        ("model", manifest.model),
        ("version", str(manifest.version)),
        ("aliases", ", ".join(aliases)),
        ("digest", manifest.digest),
        ("files", f"{manifest.files:,}"),
        ("size", format_size(manifest.size_bytes)),
        ("saved", manifest.saved),
        *((name.replace("_", " "), value) for name, value in _known(manifest.lineage)),
        *((f"label {name}", value) for name, value in manifest.labels.items()),
    ]
    for name, value in rows:
        if value:
            sys.stdout.write(f"{name + ':':20}{one_line(value)}\n")
    if files:
        sys.stdout.write("\n")
        print_columns(("MODE", "SIZE", "SHA256", "PATH"), [row_of(entry) for entry in manifest.entries])


def document_of(manifest: VersionManifest) -> dict[str, Any]:
    """Return a version for programs; with its entries if the manifest was read with them."""
    said: dict[str, Any] = {
        "model": manifest.model,
        "version": manifest.version,
        "digest": manifest.digest,
        "files": manifest.files,
        "bytes": manifest.size_bytes,
        "saved": manifest.saved,
        "labels": dict(manifest.labels),
        "lineage": dict(_known(manifest.lineage)),
    }
    if manifest.damage is not None:
        said["damage"] = str(manifest.damage)
    if manifest.entries:
        said["entries"] = [entry._asdict() for entry in manifest.entries]
    return said


def row_of(entry: Entry) -> list[str]:
    if entry.kind == "symlink":
        return ["link", "", "", f"{entry.path} -> {entry.target}"]
    if entry.kind == "directory":
        return [f"{entry.mode:04o}", "", "", f"{entry.path}/"]
    return [f"{entry.mode:04o}", f"{entry.size:,}", entry.sha256, entry.path]


def _known(lineage: Lineage) -> list[tuple[str, str]]:
    said = [(each.name, getattr(lineage, each.name)) for each in fields(Lineage)]
    return [(name, " ".join(value) if isinstance(value, tuple) else value) for name, value in said if value]
