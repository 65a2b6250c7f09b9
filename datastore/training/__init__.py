"""Launches TrainingJobs: what all launchers share is pure; local/ runs one on this machine.

import datastore.training
job = datastore.training.submit("job.yaml")
job.watch()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastore.training.notebook import Job, job, submit

__all__ = ["Job", "job", "submit"]


def __getattr__(name: str) -> Any:
    """The functions for notebooks, loaded when somebody asks: the controller uses the pure parts only."""
    if name in __all__:
        import datastore.training.notebook as notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
