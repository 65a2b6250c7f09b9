"""CEL rules of the API server (x-kubernetes-validations) that several kinds share. Pure."""

from __future__ import annotations

from pydantic import ConfigDict

Rule = dict[str, str]


def rules(*each: Rule) -> ConfigDict:
    """The configuration of a model whose schema carries these rules."""
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [{**rule} for rule in each]})


def immutable(*fields: str, optional: tuple[str, ...] = (), why: str) -> list[Rule]:
    """These fields never change, and the optional ones never come or go. why: completes "FIELD is immutable: ".

    Not `self.?x == oldSelf.?x`: the API server's cost estimate takes an optional for unbounded and refuses the rule.
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
