"""The controller of TrainingJobs as a Kind for the operator (runtime/operator.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from datastore.controller.runtime.client import Client, Fence
from datastore.controller.runtime.operator import Kind, Reconcile
from datastore.controller.runtime.queue import WorkQueue
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.runtime.watches import Watch
from datastore.controller.trainingjobs.informers import Informers
from datastore.controller.trainingjobs.metrics import TRAININGJOBS
from datastore.controller.trainingjobs.reconciler import Reconciler
from datastore.controller.trainingjobs.settings import Settings


class TrainingJobKind(Kind):
    """See runtime.operator.Kind."""

    def __init__(self, settings: Settings, client: Client, fence: Fence) -> None:
        self._queue = WorkQueue()
        self._informers = Informers(self._queue.add, saves_models=settings.saves_models)
        self._reconciler = Reconciler(client, Recorder(client, settings.identity), self._informers, settings)

    def watches(self) -> Sequence[Watch]:
        """See Kind."""
        return self._informers.watches()

    def queues(self) -> Sequence[tuple[WorkQueue, Reconcile]]:
        """See Kind."""
        return ((self._queue, self._reconciler.reconcile),)

    def beside(self, leading: Callable[[], bool]) -> Sequence[Callable[[], Awaitable[None]]]:
        """See Kind."""
        return (partial(self._reconciler.usage.run, leading),)

    def refresh(self) -> None:
        """See Kind."""
        TRAININGJOBS.clear()
        for phase, count in self._reconciler.phases().items():
            TRAININGJOBS.labels(phase).set(count)
