"""What an administrator chooses for the controller of Servings."""

from __future__ import annotations

from dataclasses import dataclass

from datastore.controller.runtime.settings import RuntimeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RuntimeSettings):
    """Read from the command line in __main__."""

    identity: str = "datastore-servings"
    verify_image: str = ""
    """Image of this project, in which each pod verifies its version before it serves; empty: that of our own pod."""
    verify_pull_policy: str = "IfNotPresent"
