"""Where the cluster's nodes are: their addresses and nothing else of them, watched only while a StorageClass asks.

Node objects are large and change often, so each is read and dropped. Event loop only, but for addresses().
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
"""Nodes in one answer: parsed, a large one takes 100 KiB."""
AGAIN_S = 2.0
WANTED_S = 1.0
"""How soon a class that comes is noticed."""
KINDS = frozenset({"InternalIP", "ExternalIP"})


class Nodes:
    """wanted: whether a class asks for addresses; active: whether it is this replica's turn; changed: they did."""

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
        """All of them, sorted. From any thread. Errors: Unreachable while they are not known."""
        known = self._addresses
        found = sorted({each for of_one in known.values() for each in of_one}) if known else []
        if not found:
            # Never an empty list: exports would be taken from everybody.
            raise Unreachable("the addresses of the cluster's nodes are not known yet")
        return tuple(found)

    async def run(self) -> None:
        """Watch, for ever."""
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
    """The addresses from which a node may come. Pure."""
    found = set()
    for each in (node.get("status") or {}).get("addresses") or []:
        if each.get("type") in KINDS:
            with suppress(ValueError):
                found.add(str(ipaddress.ip_address(each.get("address", ""))))
    return frozenset(found)
