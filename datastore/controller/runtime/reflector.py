"""Watches what kopf does not: what is of interest only at times, or in namespaces that are not served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from datastore.api.resources import Resource
from datastore.controller.runtime.client import PAGE, ApiError, Client, Raw, Unavailable
from datastore.controller.runtime.informers import key_of
from datastore.controller.runtime.queue import Key
from datastore.logs import Limiter, fields

log = logging.getLogger(__name__)
T = TypeVar("T")

AGAIN_S = 2.0
"""The least seconds between the beginnings of two watches."""
TURN_S = 0.1
"""How soon a watch begins once it is wanted."""


async def keep_watching(what: str, once: Callable[[], Awaitable[None]], wanted: Callable[[], bool]) -> None:
    """Watch forever, whenever it is wanted: call `once`, which returns when its watch ends. what: for the log."""
    limiter, time = Limiter(), asyncio.get_running_loop().time
    while True:
        while not wanted():
            await asyncio.sleep(TURN_S)
        started = time()
        try:
            await once()
        except (ApiError, Unavailable) as error:
            if limiter.allows(str(error), started):
                log.warning("a watch will be begun again", extra=fields(of=what, error=error))
        await asyncio.sleep(max(0.0, started + AGAIN_S - time()))


async def snapshots(
    client: Client,
    resource: Resource,
    namespace: str,
    keep: Callable[[Raw], T],
    *,
    labels: str = "",
    limit: int = PAGE,
) -> AsyncGenerator[dict[Key, T], None]:
    """Yield what keep() returns of each object of a namespace ('' for all), then the same after each event, until the
    watch ends. limit: objects on one page of the list. Errors: ApiError, Unavailable."""
    found: dict[Key, T] = {}
    version = ""
    async with aclosing(client.pages(resource, namespace, label_selector=labels, limit=limit)) as pages:
        async for items, version in pages:  # noqa: B007  (the version of the last page is used below)
            found |= {key_of(each): keep(each) for each in items}
    yield found
    async with aclosing(client.watch(resource, namespace, whole=True, version=version)) as events:
        async for kind, body in events:
            if kind == "DELETED":
                found = {key: each for key, each in found.items() if key != key_of(body)}
            elif kind != "BOOKMARK":
                found = {**found, key_of(body): keep(body)}
            yield found
