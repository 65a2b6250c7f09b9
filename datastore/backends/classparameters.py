"""Parses a StorageClass's parameters: truth values, and templates that are filled in for each claim. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from datastore.errors import InvalidManifest

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_TRUTH = {"true": True, "false": False}


def truth(name: str, text: str) -> bool:
    """Parse a parameter that is 'true' or 'false'. Errors: InvalidManifest."""
    if text not in _TRUTH:
        raise InvalidManifest(f"{name} must be 'true' or 'false'")
    return _TRUTH[text]


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each ${name} replaced by its value. Errors: InvalidManifest for a name without one."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise InvalidManifest(f"${{{found[1]}}} is not known; there are {', '.join(values)}")
        return values[found[1]]

    return _VARIABLE.sub(value, template)


def check_unambiguous(template: str) -> None:
    """Check that no two claims share a place, as `a-b` + `c`, `a` + `b-c` do with a hyphen. Errors: InvalidManifest."""
    for first, between in re.findall(r"\$\{(pvc\.name(?:space)?)\}([^$]*)(?=\$\{)", template):
        safe = "/" in between or (first == "pvc.namespace" and "." in between)
        if not safe:
            raise InvalidManifest(f"put a '/' after ${{{first}}}, so that no two claims share a place")
