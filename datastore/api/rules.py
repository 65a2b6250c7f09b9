"""What the schemas of several kinds tell the API server: CEL rules (x-kubernetes-validations), keys of lists. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

Rule = dict[str, str]


def rules(*each: Rule) -> ConfigDict:
    """Return the configuration of a pydantic model whose schema has these rules."""
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [{**rule} for rule in each]})


def keyed_by(field: str) -> dict[str, Any]:
    """Return what the schema of a list of objects has when the API server shall merge the list by this field."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


def immutable(*fields: str, optional: tuple[str, ...] = (), why: str) -> list[Rule]:
    """Return rules by which fields never change; an optional one is never added or removed either.

    why: completes "FIELD is immutable: ". The rules don't use `self.?x == oldSelf.?x`, because the API server's cost
    estimate takes an optional for unbounded and refuses such a rule.
    """
    wanted = {name: f"self.{name} == oldSelf.{name}" for name in fields}
    for name in optional:
        both = f"has(self.{name}) == has(oldSelf.{name})"
        wanted[name] = f"{both} && (!has(self.{name}) || self.{name} == oldSelf.{name})"
    return [
        {
            "rule": rule,
            "message": f"{name} is immutable: {why}",
            "reason": "FieldValueForbidden",
            "fieldPath": f".{name}",
        }
        for name, rule in wanted.items()
    ]
