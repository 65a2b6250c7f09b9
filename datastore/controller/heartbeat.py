"""Proves that the watch is alive: a Lease that is written by request must come back by the watch.

The echo is also the permission to work: it stops when the API server can't be reached, when a watch hangs, and when
kopf pauses because another replica of the peering works. So a replica that has not seen its echo changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from datastore.api.names import MANAGER
from datastore.controller.cluster import Cluster
from datastore.controller.metrics import LAST_HEARTBEAT
from datastore.controller.settings import Settings
from datastore.logs import fields

log = logging.getLogger(__name__)
MISSED = 3
"""So many intervals without an echo: the watch is dead, or not ours."""


class Heartbeat:
    """clock: monotonic seconds."""

    def __init__(self, cluster: Cluster, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._written = float("-inf")
        self._seen = float("-inf")

    async def write(self) -> None:
        """Renew the Lease."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": MANAGER, "namespace": self._settings.namespace},
            "spec": {
                "holderIdentity": self._settings.identity,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        await self._cluster.apply(body)
        self._written = self._clock()

    def seen(self, body: Mapping[str, Any]) -> None:
        """The watch showed the Lease."""
        metadata = body["metadata"]
        if metadata["name"] == MANAGER and metadata["namespace"] == self._settings.namespace:
            self._seen = self._clock()
            LAST_HEARTBEAT.set_to_current_time()
            log.debug("heartbeat seen", extra=fields(holder=body.get("spec", {}).get("holderIdentity", "")))

    def active(self) -> bool:
        """Whether the watch shows what happens: work only then."""
        return self._clock() - self._seen < MISSED * self._settings.heartbeat_s

    def answered(self) -> bool:
        """Whether the API server took a heartbeat lately."""
        return self._clock() - self._written < MISSED * self._settings.heartbeat_s
