"""Watches the addresses of the cluster's nodes, and nothing else of them, while a StorageClass needs them.

Node objects are large and change often, so each is dropped once read. Only addresses() may run off the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from datastore.api.resources import NODES
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.errors import Unreachable
from datastore.logs import Limiter, fields

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

PAGE = 50
"""Nodes on one page of a list; a large node takes 100 KiB once it is parsed."""
AGAIN_S = 2.0
WANTED_S = 1.0
"""How soon, in seconds, run() notices that a class needs the addresses."""
KINDS = frozenset({"InternalIP", "ExternalIP"})


class Nodes:
    """wanted: whether a class needs addresses; active: whether this replica leads; changed: called after a change."""

    def __init__(
        self,
        client: Client,
        wanted: Callable[[], bool],
        active: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._active = active
        self._changed = changed
        self._addresses: dict[str, frozenset[str]] | None = None
        self._limiter = Limiter()

    def addresses(self) -> tuple[str, ...]:
        """Return all addresses, sorted. Any thread may call this. Errors: Unreachable while they are not known."""
        known = self._addresses
        found = sorted({each for of_one in known.values() for each in of_one}) if known else []
        if not found:
            # Never return an empty list: the exports would then be withdrawn from all clients.
            raise Unreachable("the addresses of the cluster's nodes are not known yet")
        return tuple(found)

    async def run(self) -> None:
        """Watch forever, whenever a class needs the addresses and this replica leads."""
        while True:
            while not (self._active() and self._wanted()):
                await asyncio.sleep(WANTED_S)
            try:
                await self._once()
            except (ApiError, Unavailable) as error:
                if self._limiter.allows(str(error), asyncio.get_running_loop().time()):
                    log.warning("the watch of nodes will be begun again", extra=fields(error=error))
            await asyncio.sleep(AGAIN_S)

    async def _once(self) -> None:
        found: dict[str, frozenset[str]] = {}
        version = ""
        async with aclosing(self._client.pages(NODES, "", limit=PAGE)) as pages:
            async for items, listed in pages:
                version = listed
                found |= {each["metadata"]["name"]: addresses_of(each) for each in items}
        self._take(found)
        async with aclosing(self._client.watch(NODES, "", whole=True, version=version)) as events:
            async for kind, body in events:
                if not (self._active() and self._wanted()):
                    return
                if kind in ("ADDED", "MODIFIED"):
                    found = {**found, body["metadata"]["name"]: addresses_of(body)}
                elif kind == "DELETED":
                    found = {name: each for name, each in found.items() if name != body["metadata"]["name"]}
                self._take(found)

    def _take(self, found: dict[str, frozenset[str]]) -> None:
        before, self._addresses = self._addresses, found
        if before != found:
            self._changed()


def addresses_of(node: Raw) -> frozenset[str]:
    """Return the addresses from which a node may connect. Pure."""
    found = set()
    for each in (node.get("status") or {}).get("addresses") or []:
        if each.get("type") in KINDS:
            with suppress(ValueError):
                found.add(str(ipaddress.ip_address(each.get("address", ""))))
    return frozenset(found)
