"""What an administrator chooses for the controller of TrainingJobs."""

from __future__ import annotations

from dataclasses import dataclass

from datastore.controller.runtime.settings import RuntimeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RuntimeSettings):
    """The settings, which __main__ reads from the command line and the environment."""

    overlays: frozenset[str] = frozenset()
    """Those of overlay.OVERLAYS that users may put into the templates of their pods."""
    saves_models: bool = False
    """Whether the component models is installed, which saves the results of jobs (spec.save)."""
