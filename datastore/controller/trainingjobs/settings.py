"""What an administrator chooses for the controller of TrainingJobs."""

from __future__ import annotations

from dataclasses import dataclass

from datastore.controller.runtime.settings import RuntimeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RuntimeSettings):
    """Read from the command line in __main__."""

    overlays: frozenset[str] = frozenset()
    """What of overlay.OVERLAYS users may put into the template of their pods."""
    saves_models: bool = False
    """Whether the component models is there, which saves what a job has made."""
