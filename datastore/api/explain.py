"""Explains in one line why a manifest does not fit the models: which field, what is wrong, what is right. Pure.

A value is shown only if the model's check shows it, or if it is a short word where only certain words are allowed: a
manifest can hold a misplaced key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from datastore.api.schema import fields_of, structural

_WANTED = {
    "string_type": "must be text",
    "bool_type": "must be true or false, without quotes",
    "dict_type": "must be a mapping of names to text",
    "model_type": "must be a mapping of fields",
    "list_type": "must be a list, such as [a, b]",
    "tuple_type": "must be a list, such as [a, b]",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "invalid_key": "must have text as names of its fields",
}
_INDEX = re.compile(r"\[[0-9]+\]")
_ORDER = ("extra_forbidden", "invalid_key")
"""Faults that are reported before all others, since a misspelt field also leaves the right field missing."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first fault of an object, such as 'spec.s3.bucket must be text ...'."""
    faults = error.errors(include_url=False, include_context=True)
    fault = min(faults, key=lambda each: (each["type"] not in _ORDER,))
    known = _known(model)
    path = _path(fault["loc"])
    kind = fault["type"]
    if kind == "extra_forbidden":
        return f"{path} is not a field; {_meant(path, list(known))}"
    if kind == "missing":
        return f"{path} is missing: {_first_sentence(known.get(_INDEX.sub('[]', path), ''))}"
    inside = _example(path, list(known)) if kind == "model_type" else ""
    return f"{path or 'it'} {_complaint(kind, fault)}{inside}"


@cache
def _known(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of every field, by its path."""
    return {path: schema.get("description", "") for path, schema, _ in fields_of(structural(model))}


def similar(wrong: str, right: Sequence[str]) -> str:
    """Return the name that was probably meant, or ''. The case of letters, '_' and '-' are ignored."""
    folded = {_fold(name): name for name in right}
    found = difflib.get_close_matches(_fold(wrong), list(folded), n=1, cutoff=0.7)
    return folded[found[0]] if found else ""


def _complaint(kind: str, fault: Any) -> str:
    given = fault.get("input")
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind == "literal_error":
        shown = f", not {given!r}" if isinstance(given, str) and len(given) <= 32 and given.isalnum() else ""
        return f"must be {fault['ctx']['expected']}{shown}"
    if given is None and kind in _WANTED:
        return f"is empty; it {_WANTED[kind]}"
    if kind == "string_type" and isinstance(given, bool | int | float):
        return "must be text; YAML reads this as a number or a truth value, so put it in quotes"
    # pydantic's own texts are "Input should be ...", "List should have ... after validation, not 0"
    return _WANTED.get(kind) or re.sub(r"^\w+ should ", "must ", str(fault["msg"])).replace(" after validation", "")


def _example(path: str, known: list[str]) -> str:
    """Return how a mapping with one of the fields that belong there is written."""
    within = _INDEX.sub("[]", path)
    field = next((each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == within), "")
    return f", such as {{{field}: ...}}" if field else ""


def _meant(path: str, known: list[str]) -> str:
    parent, _, name = path.rpartition(".")
    within = _INDEX.sub("[]", parent)
    beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == within]
    if near := similar(name, beside):
        return f"did you mean {f'{parent}.{near}' if parent else near}?"
    elsewhere = [each for each in known if _fold(each.rpartition(".")[2]) == _fold(name)]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"{parent or 'it'} has {', '.join(beside)}" if beside else f"{parent} takes no fields"


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for step in location:
        # pydantic marks a wrong key of a mapping this way; the key itself is the step before.
        if step != "[key]":
            text += f"[{step}]" if isinstance(step, int) else f".{_shown(step)}"
    return text.removeprefix(".")


def _shown(name: str) -> str:
    """Return the name of a field; one that is long or not printable is cut and escaped, to stay on its line."""
    return name if len(name) <= 64 and name.isprintable() else ascii(name[:64])


def _first_sentence(description: str) -> str:
    end = description.find(". ")
    return (description if end < 0 else description[:end]).rstrip(".")


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
