"""`datastore model diff NAME[:VERSION] [NAME:]VERSION`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, one_line, print_json
from datastore.cli.model.places import File, Store, open_store
from datastore.models.manifest import Entry
from datastore.models.names import parse_reference
from datastore.models.verifying import compared
from datastore.units import format_size


def diff_command(
    first: Annotated[
        str,
        typer.Argument(
            metavar="NAME[:VERSION|ALIAS]", help="Name of the model, and the first version. Default: the newest."
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="[NAME:]VERSION|ALIAS", help="The second version. Without NAME it is of the same model."
        ),
    ],
    file: File = None,
    store: Store = None,
    output: Output = Format.TABLE,
) -> None:
    """Show what differs between two versions, by their manifests: paths, sizes, digests, modes, links."""
    one = parse_reference(first)
    other = parse_reference(second if ":" in second else f"{one.model}:{second}")
    with open_store(file, store) as opened:
        models = opened.models
        before = models.manifest(one.model, models.resolve(one))
        after = models.manifest(other.model, models.resolve(other))
    found = compared(before, after)
    if output is Format.JSON:
        print_json([{"path": path, "first": _shown(old), "second": _shown(new)} for path, old, new in found])
        return
    for path, old, new in found:
        sys.stdout.write(one_line(_line(path, old, new)) + "\n")
    if not found:
        note(f"{one.model}:{before.version} and {other.model}:{after.version} hold the same")


def _shown(entry: Entry | None) -> dict[str, Any] | None:
    return None if entry is None else entry._asdict()


def _line(path: str, old: Entry | None, new: Entry | None) -> str:
    if old is None and new is not None:
        return f"+ {path} {_about(new)}"
    if new is None and old is not None:
        return f"- {path} {_about(old)}"
    assert old is not None
    assert new is not None
    if old.kind == new.kind == "file" and old.sha256 == new.sha256:
        return f"~ {path} mode {old.mode:04o} -> {new.mode:04o}"
    same = old.kind == new.kind == "file" and old.size == new.size
    changed = f"other bytes, {_about(new)}" if same else f"{_about(old)} -> {_about(new)}"
    return f"~ {path} {changed}"


def _about(entry: Entry) -> str:
    if entry.kind == "symlink":
        return f"link to {entry.target}"
    return f"directory {entry.mode:04o}" if entry.kind == "directory" else format_size(entry.size)
