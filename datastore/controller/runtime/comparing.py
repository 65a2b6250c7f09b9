"""Compares an object of the cluster with the wanted one. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from datastore.units import parse_quantity

Raw = Mapping[str, Any]


def holds(observed: Any, wanted: Any) -> bool:
    """Whether `observed` has all that is wanted, whatever else it has; a field `storage` is compared as an amount."""
    if wanted == "":
        # The API server leaves out fields with empty text.
        return observed in (None, "")
    if isinstance(wanted, Mapping):
        return isinstance(observed, Mapping) and all(_field_holds(observed, name, wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        if not isinstance(observed, list) or len(observed) < len(wanted):
            return False
        return all(any(holds(each, one) for each in observed) for one in wanted)
    return bool(observed == wanted)


def digest(applied: Raw) -> str:
    """Return the value of the annotation APPLIED, which shows what holds() does not: a field that is gone."""
    return hashlib.sha256(json.dumps(applied, sort_keys=True).encode()).hexdigest()[:16]


def _field_holds(observed: Raw, name: str, wanted: Any) -> bool:
    if name == "storage" and isinstance(wanted, str):
        return isinstance(observed.get(name), str | int) and parse_quantity(observed[name]) == parse_quantity(wanted)
    return holds(observed.get(name), wanted)
