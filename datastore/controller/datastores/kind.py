"""Puts together the controller of Datastores, for the operator (runtime/operator.py)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from datastore.controller.datastores.effective import SecretRef
from datastore.controller.datastores.informers import Informers
from datastore.controller.datastores.metrics import DATASTORES
from datastore.controller.datastores.nodes import Nodes
from datastore.controller.datastores.plainclaims import PlainClaims
from datastore.controller.datastores.reconciler import Reconciler
from datastore.controller.datastores.rotation import Announcer
from datastore.controller.datastores.secretwatch import SecretWatch, Uses
from datastore.controller.datastores.serverclaims import watch_server_claims
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import Client, Fence
from datastore.controller.runtime.operator import Kind, Reconcile
from datastore.controller.runtime.queue import WorkQueue
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.runtime.watches import Watch

log = logging.getLogger(__name__)


class DatastoreKind(Kind):
    """See runtime.operator.Kind."""

    def __init__(self, settings: Settings, client: Client, fence: Fence) -> None:
        self._settings = settings
        self._client = client
        self._datastores = WorkQueue()
        self._claims = WorkQueue()
        self._informers = Informers(self._datastores.add, self._claims.add, settings.serves)
        self._uses = Uses()
        self._leading: Callable[[], bool] = lambda: False
        self._nodes = Nodes(client, self._informers.nodes_wanted, lambda: self._leading(), self._nodes_changed)
        recorder = Recorder(client, settings.identity)
        self._reconciler = Reconciler(
            client,
            recorder,
            self._informers,
            settings,
            self._uses,
            self._nodes.addresses,
            wake=self._datastores.add,
            fence=fence,
        )
        self._plain = PlainClaims(client, self._informers, recorder)
        self._announcer = Announcer(client, self._uses)

    def watches(self) -> Sequence[Watch]:
        """See Kind."""
        return self._informers.watches()

    def queues(self) -> Sequence[tuple[WorkQueue, Reconcile]]:
        """See Kind."""
        return ((self._datastores, self._reconciler.reconcile), (self._claims, self._plain.provision))

    def beside(self, leading: Callable[[], bool]) -> Sequence[Callable[[], Awaitable[None]]]:
        """See Kind."""
        self._leading = leading
        always = (self._nodes.run, partial(watch_server_claims, self._client, self._informers))
        if not self._settings.watch_secrets:
            return always
        watch = SecretWatch(self._client, self._uses, leading, self._secret_changed)
        watched = self._settings.watched_namespaces or ("",)
        return (*(partial(watch.run, namespace) for namespace in watched), self._announcer.run, *always)

    def refresh(self) -> None:
        """See Kind."""
        DATASTORES.clear()
        for reason, count in self._reconciler.reasons().items():
            DATASTORES.labels(reason).set(count)

    async def close(self) -> None:
        """See Kind."""
        self._reconciler.close()

    def _nodes_changed(self) -> None:
        for key in self._reconciler.nodes_changed():
            self._datastores.add(key)

    def _secret_changed(self, secret: SecretRef, version: str, rotated: bool) -> None:
        for key in self._reconciler.renewed(secret):
            self._datastores.add(key)
        if rotated:
            self._announcer.rotated(secret, version)
