"""What an administrator chooses for the controller of Servings."""

from __future__ import annotations

from dataclasses import dataclass

from datastore.controller.runtime.settings import RuntimeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RuntimeSettings):
    """The settings, which __main__ reads from the command line."""

    identity: str = "datastore-servings"
    verify_image: str = ""
    """Image of this project, with which each pod verifies its version before it serves; '': the controller's own."""
