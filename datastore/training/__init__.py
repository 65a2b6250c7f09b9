"""Submits TrainingJobs to this machine or to a cluster, and observes them, from programs and notebooks.

import datastore.training
job = datastore.training.submit("job.yaml")  # cluster=True: in the cluster of kubectl's context
job.watch()

Of the packages, local/ runs jobs on this machine, cluster/ in Kubernetes; what both share is pure.
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


def __dir__() -> list[str]:
    """Name these functions to help() and to the completion of a notebook, also before their first use."""
    return [*globals(), *__all__]
