"""Generates docs/reference/KIND.md from the models. `python -m datastore.api.reference DIR` writes the pages there."""

from __future__ import annotations

import sys
from pathlib import Path

from datastore.api.kinds import KINDS, Kind
from datastore.api.schema import Schema, fields_of, structural

_IMMUTABLE = "Can't be changed later in a cluster."
_SHOWN = ("capacity", "conflict", "sftp", "uploadLimit", "writeBack")
"""Fields whose validation rule does not make them immutable; their descriptions say what the rule demands."""


def text(kind: Kind) -> str:
    """Return the reference page of a kind."""
    spec = structural(kind.model)["properties"]["spec"]
    head = f"# {kind.name}\n\nGenerated from `{kind.module}` by `python -m datastore.api.reference`; do not edit.\n\n"
    parts = [head + kind.intro, *_sections("spec", spec)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sections(path: str, schema: Schema) -> list[str]:
    """Return sections for an object and the objects in it, depth first. Objects with equal fields share one section."""
    parts: list[str] = []
    places: dict[str, list[str]] = {}
    waiting = [(path, schema)]
    while waiting:
        where, node = waiting.pop(0)
        places.setdefault(repr(node.get("properties")), []).append(where)
        if len(places[repr(node.get("properties"))]) > 1:
            continue
        parts.append(f"## {where}\n\n{node['description']}\n\n{_table(where, node)}")
        below = []
        for name, inner in node["properties"].items():
            if "properties" in (inside := inner.get("items", inner)):
                below.append((f"{where}.{name}" + ("[]" if "items" in inner else ""), inside))
        waiting = below + waiting
    same = {listed[0]: listed[1:] for listed in places.values() if len(listed) > 1}
    return [_with_others(part, same) for part in parts]


def _with_others(part: str, same: dict[str, list[str]]) -> str:
    where = part.partition("\n")[0].removeprefix("## ")
    if where not in same:
        return part
    listed = ", ".join(f"`{each}`" for each in same[where])
    title, _, rest = part.partition("\n\n")
    return f"{title}\n\nThe same fields as in {listed}.\n\n{rest}"


def _table(path: str, schema: Schema) -> str:
    rows = ["| Field | Type | Default | Description |", "|---|---|---|---|"]
    fixed = {rule.get("fieldPath", "").lstrip(".") for rule in schema.get("x-kubernetes-validations", [])}
    for field, inner, required in fields_of(schema):
        if "." in field:
            continue
        default = "required" if required else _default(inner)
        changes = f" {_IMMUTABLE}" if field in fixed and field not in _SHOWN else ""
        description = _cell(inner.get("description", "")) + changes
        rows.append(f"| `{path}.{field}` | {_type(inner)} | {default} | {description} |")
    return "\n".join(rows)


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "duration" if "ms" in schema["pattern"] else "size"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    names = {"string": "text", "boolean": "true or false", "object": "mapping", "integer": "whole number"}
    return names[schema["type"]]


def _default(schema: Schema) -> str:
    default = schema.get("default")
    if default is None or default in ({}, []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(description: str) -> str:
    return description.replace("|", "\\|")


if __name__ == "__main__":
    for each in KINDS:
        Path(sys.argv[1], each.page).write_text(text(each))
