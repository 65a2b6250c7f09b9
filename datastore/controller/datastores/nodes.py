"""Watches the addresses of the cluster's nodes, and nothing else of them, while a StorageClass needs them.

Node objects are large and change often, so each is dropped once read. Only addresses() may run off the event loop.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from datastore.api.resources import NODES
from datastore.controller.runtime.client import Client
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.reflector import keep_watching, snapshots
from datastore.errors import Unreachable

Raw = Mapping[str, Any]

PAGE = 50
"""Nodes on one page of a list; a large node takes 100 KiB once it is parsed."""
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
        self._addresses: dict[Key, frozenset[str]] | None = None

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
        await keep_watching("nodes", self._once, self._needed)

    def _needed(self) -> bool:
        return self._active() and self._wanted()

    async def _once(self) -> None:
        async with aclosing(snapshots(self._client, NODES, "", addresses_of, limit=PAGE)) as shown:
            async for found in shown:
                if not self._needed():
                    return
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
