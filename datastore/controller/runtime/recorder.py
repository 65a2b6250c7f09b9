"""Records Events about an object, as `kubectl describe` shows them. A refusal by the API server is only logged."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from datastore.api.names import MANAGER
from datastore.api.objects import timestamp
from datastore.api.resources import EVENTS
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.logs import fields

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]
DEFAULT_NAMESPACE = "default"
"""Where Events about objects without a namespace are, by convention."""


class Recorder:
    """Writes core/v1 Events. instance: the name of this replica."""

    def __init__(self, client: Client, instance: str) -> None:
        self._client = client
        self._instance = instance

    async def record(self, about: Raw, event: Event) -> None:
        """Record an Event; a refusal, as by a namespace in deletion, is only logged. Errors: Unavailable, LeaseLost."""
        metadata = about["metadata"]
        namespace = metadata.get("namespace") or DEFAULT_NAMESPACE
        now = timestamp()
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name'][:200]}.{secrets.token_hex(8)}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata.get("namespace", ""),
                "uid": metadata["uid"],
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "message": event.message.encode()[:1024].decode("utf-8", "ignore"),
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        where = f"{namespace}/{metadata['name']}"
        log.info("event", extra=fields(about=where, reason=event.reason, message=event.message))
        try:
            await self._client.create(EVENTS, namespace, body)
        except ApiError as error:
            log.warning("the event was not recorded", extra=fields(about=where, error=error))
