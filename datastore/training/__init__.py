"""Launches TrainingJobs: local/ runs them on this machine, cluster/ in Kubernetes; what both share is pure.

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
    """Import the functions for notebooks at their first use, as the controller needs only the pure parts."""
    if name in __all__:
        import datastore.training.notebook as notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
