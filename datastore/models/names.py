"""Names of models, versions and aliases, and the references that people type: NAME, NAME:7, NAME:prod. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from datastore.api.fields import ALIAS_PATTERN, LATEST, MODEL_PATTERN, matches
from datastore.models.errors import InvalidReference

_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed NAME[:VERSION|ALIAS]. When version and alias are both None, the newest version is meant."""

    model: str
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        which = self.version or self.alias
        return f"{self.model}:{which}" if which else self.model


def parse_reference(text: str) -> Reference:
    """Parse NAME, NAME:7, NAME:prod or NAME:latest. Errors: InvalidReference."""
    model, colon, rest = text.partition(":")
    check_model(model)
    if not colon or rest == LATEST:
        return Reference(model)
    number = version_number(rest)
    if number is not None:
        return Reference(model, version=number)
    if not matches(ALIAS_PATTERN, rest):
        raise InvalidReference(f"{rest[:80]!r} is no version (1, 2, ...) and no alias of {model} (prod, canary, ...)")
    return Reference(model, alias=rest)


def check_model(name: str) -> str:
    """Return the name if a model can have it. Errors: InvalidReference."""
    if not matches(MODEL_PATTERN, name):
        raise InvalidReference(
            f"{name[:80]!r} can't be the name of a model: lower-case letters, digits and '-', at most 63 characters"
        )
    return name


def check_alias(name: str) -> str:
    """Return the name if an alias can have it. Errors: InvalidReference."""
    if name == LATEST:
        raise InvalidReference(f"the alias {LATEST} always means the newest version, so it can't be moved")
    if not matches(ALIAS_PATTERN, name):
        raise InvalidReference(
            f"{name[:80]!r} can't be an alias: a letter first, then lower-case letters, digits and '-', at most 63"
        )
    return name


def is_model(name: str) -> bool:
    """Return whether a directory of this name can be a model's."""
    return matches(MODEL_PATTERN, name)


def is_alias(name: str) -> bool:
    """Return whether a file of this name can be an alias."""
    return matches(ALIAS_PATTERN, name) and name != LATEST


def version_number(text: str) -> int | None:
    """Return the version number that a text is: 1 to 9 digits without leading zeros; None for any other text."""
    return int(text) if _NUMBER.match(text) else None
