"""Watches the claims of the NFS servers in the cluster where kopf does not: with NAMESPACES, their namespace is none of
the served ones.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from datastore.api.names import MANAGED_BY, MANAGER
from datastore.api.resources import CLAIMS
from datastore.controller.datastores.informers import Informers
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.informers import key_of
from datastore.logs import Limiter, fields

log = logging.getLogger(__name__)

AGAIN_S = 2.0


class ServerClaims:
    """See the module. All replicas watch, as kopf does."""

    def __init__(self, client: Client, informers: Informers) -> None:
        self._client = client
        self._informers = informers
        self._limiter = Limiter()

    async def run(self) -> None:
        """Watch forever; a namespace that a class names later is watched within AGAIN_S."""
        watches: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                for namespace in self._informers.server_namespaces():
                    if namespace not in watches or watches[namespace].done():
                        watches[namespace] = group.create_task(self._watched(namespace))
                await asyncio.sleep(AGAIN_S)

    async def _watched(self, namespace: str) -> None:
        try:
            await self._once(namespace)
        except (ApiError, Unavailable) as error:
            if self._limiter.allows(f"{namespace} {error}", asyncio.get_running_loop().time()):
                log.warning(
                    "the watch of NFS servers' claims will be begun again",
                    extra=fields(namespace=namespace, error=error),
                )

    async def _once(self, namespace: str) -> None:
        version, listed = "", set()
        pages = self._client.pages(CLAIMS, namespace, label_selector=f"{MANAGED_BY}={MANAGER}")
        async with aclosing(pages):
            async for items, version in pages:  # noqa: B007  (the version of the last page is used below)
                for each in items:
                    listed.add(key_of(each))
                    self._informers.server_claim({"type": None, "object": each})
        for each in self._informers.claims.values():
            if each["metadata"]["namespace"] == namespace and key_of(each) not in listed:
                self._informers.server_claim({"type": "DELETED", "object": each})
        async with aclosing(self._client.watch(CLAIMS, namespace, whole=True, version=version)) as events:
            async for kind, body in events:
                if kind != "BOOKMARK":
                    self._informers.server_claim({"type": kind, "object": body})
