"""Watches the claims of the NFS servers in the cluster where kopf does not: with NAMESPACES, their namespace is none of
the served ones. All replicas watch, as kopf does.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

from datastore.api.names import MANAGED_BY, MANAGER
from datastore.api.resources import CLAIMS
from datastore.controller.datastores.informers import Informers
from datastore.controller.runtime.client import Client
from datastore.controller.runtime.informers import slim
from datastore.controller.runtime.reflector import keep_watching, snapshots

LOOK_S = 2.0
"""How soon a namespace that a class names later is watched."""


async def watch_server_claims(client: Client, informers: Informers) -> None:
    """Watch forever."""

    async def once(namespace: str) -> None:
        labels = f"{MANAGED_BY}={MANAGER}"
        async with aclosing(snapshots(client, CLAIMS, namespace, slim, labels=labels)) as shown:
            async for found in shown:
                informers.server_claims(namespace, found)

    watched: set[str] = set()
    async with asyncio.TaskGroup() as group:
        while True:
            for each in informers.server_namespaces() - watched:
                watched.add(each)
                group.create_task(keep_watching(f"claims of {each}", partial(once, each), lambda: True))
            await asyncio.sleep(LOOK_S)
