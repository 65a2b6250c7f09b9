"""The text of a StorageClass's parameters: truth values, and templates that every claim fills in its own way. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from datastore.errors import InvalidManifest

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_TRUTH = {"true": True, "false": False}


def truth(name: str, text: str) -> bool:
    """A parameter that is true or false. Errors: InvalidManifest."""
    if text not in _TRUTH:
        raise InvalidManifest(f"{name} must be 'true' or 'false'")
    return _TRUTH[text]


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with each ${name} replaced by its value. Errors: InvalidManifest for a name that has none."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise InvalidManifest(f"${{{found[1]}}} is not known; there are {', '.join(values)}")
        return values[found[1]]

    return _VARIABLE.sub(value, template)


def check_unambiguous(template: str) -> None:
    """Two different claims must not become one place: `a-b` + `c` and `a` + `b-c` would, joined by a hyphen.

    Errors: InvalidManifest.
    """
    for first, between in re.findall(r"\$\{(pvc\.name(?:space)?)\}([^$]*)(?=\$\{)", template):
        safe = "/" in between or (first == "pvc.namespace" and "." in between)
        if not safe:
            raise InvalidManifest(f"put a '/' after ${{{first}}}, so that no two claims share a place")
