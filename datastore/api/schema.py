"""Turns a pydantic model into a structural OpenAPI v3 schema, the subset that the API server takes. Pure.

In a structural schema (kubernetes.io/docs: "Specifying a structural schema") every value has a type, there is no $ref,
anyOf is only beside x-kubernetes-int-or-string, and additionalProperties never beside properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_ORDER = ("type", "description", "default", "enum", "required", "properties", "items")
_DROPPED = ("title", "$defs", "const")
NO_DEFAULT = (None, "")
"""Defaults that mean "left out"; they are not in the schema, so that the API server does not fill them in."""


def structural(model: type[BaseModel]) -> Schema:
    """Return the schema of one model, with all references inlined and the fields in the order of the model."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _inline(raw, raw.get("$defs", {}))


def fields_of(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Yield every field below a schema, depth first, as (path, schema, required): ('spec.s3.bucket', {...}, True)."""
    required = schema.get("required", [])
    for name, inner in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, inner, name in required
        yield from fields_of(inner.get("items", inner), below + ("[]" if "items" in inner else ""))


def _inline(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    kept = {name: value for name, value in _resolved(node, definitions).items() if name not in _DROPPED}
    if kept.get("default", 0) in NO_DEFAULT:
        del kept["default"]
    if "properties" in kept:
        kept.pop("additionalProperties", None)
        kept["properties"] = {name: _inline(inner, definitions) for name, inner in kept["properties"].items()}
    for place in ("items", "additionalProperties"):
        if isinstance(kept.get(place), dict):
            kept[place] = _inline(kept[place], definitions)
    return {name: kept[name] for name in sorted(kept, key=_place)}


def _place(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _resolved(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Return the node with $ref and "or null" resolved; a description or a default beside them wins."""
    while True:
        beside = {name: value for name, value in node.items() if name not in ("$ref", "anyOf")}
        kinds = [kind for kind in node.get("anyOf", []) if kind.get("type") != "null"]
        if "$ref" in node:
            node = {**definitions[node["$ref"].rsplit("/", 1)[1]], **beside}
        elif len(kinds) < len(node.get("anyOf", [])):
            node = {**(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}), **beside}
        else:
            return {**node, "enum": [node["const"]]} if "const" in node else node
