"""What pods use, by their specs alone. Pure, but for UsingPods, which lists pods.

Kubernetes keeps a claim while a pod uses it, but does not know that an inline volume names a Datastore.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datastore.api.objects import claims_of, volumes_of
from datastore.api.resources import PODS
from datastore.api.volumecontext import DRIVER, REFERENCE
from datastore.controller.runtime.client import Client

Raw = Mapping[str, Any]

NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
FRESH_S = 1.0
NAMESPACES_MAX = 256


def inline_secrets_of(pod: Raw) -> frozenset[str]:
    """Return the names of the Secrets of a pod's inline volumes of our driver."""
    return frozenset((each.get("nodePublishSecretRef") or {}).get("name", "") for each in _inline(pod))


def datastores_of(pod: Raw) -> frozenset[str]:
    """Return the Datastores that a pod's inline volumes name; none before it has a node, which would mount them."""
    if not pod.get("spec", {}).get("nodeName"):
        return frozenset()
    named = ((each.get("volumeAttributes") or {}).get(REFERENCE, "") for each in _inline(pod))
    return frozenset(each for each in named if each)


class UsingPods:
    """Finds the pods that use a Datastore; callers share a namespace's list for FRESH_S. Only for the event loop."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = asyncio.Lock()
        self._lists: dict[str, tuple[float, dict[str, tuple[frozenset[str], frozenset[str]]]]] = {}

    async def of(self, namespace: str, claim: str, datastore: str, since: float) -> tuple[str, ...]:
        """Return the names of the pods that use the claim, or the Datastore inline, by a list begun after `since`.

        claim: '' for none; since: a time of the clock. Errors: ApiError, Unavailable.
        """
        async with self._lock:
            began, found = self._lists.get(namespace, (float("-inf"), {}))
            if began < since or self._clock() - began > FRESH_S:
                if len(self._lists) >= NAMESPACES_MAX:
                    self._lists.clear()
                began = self._clock()
                pods = await self._client.list(PODS, namespace, NOT_ENDED)
                found = {pod["metadata"]["name"]: (claims_of(pod), datastores_of(pod)) for pod in pods}
                self._lists[namespace] = began, found
        return tuple(sorted(_users(found, claim, datastore)))


def _users(found: Mapping[str, tuple[frozenset[str], frozenset[str]]], claim: str, datastore: str) -> Iterator[str]:
    for name, (claims, inline) in found.items():
        if claim in claims:
            yield name
        elif datastore in inline:
            yield f"{name} (inline)"


def _inline(pod: Raw) -> list[Raw]:
    return [each["csi"] for each in volumes_of(pod) if "csi" in each and each["csi"].get("driver") == DRIVER]
