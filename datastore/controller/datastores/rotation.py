"""Brings a rotated Secret to its mounts within seconds, by annotating the pods that use it with the Secret's version.

The kubelet passes the keys to the CSI driver again whenever it syncs a pod: every 60 to 90 s, and at once when the
pod's annotations change. Nothing else of a pod is changed, which an admission policy enforces
(manifests/base/rotation.yaml). Level-triggered and idempotent: a pod that has the version already is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from datastore.api.names import CREDENTIALS
from datastore.api.objects import claims_of
from datastore.api.resources import PODS
from datastore.controller.datastores.effective import SecretRef
from datastore.controller.datastores.metrics import PODS_TOLD
from datastore.controller.datastores.pods import NOT_ENDED, inline_secrets_of
from datastore.controller.datastores.secretwatch import Uses
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.election import LeaseLost
from datastore.controller.runtime.queue import Key, WorkQueue
from datastore.logs import fields

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

PACE_S = 0.05
"""Seconds between two pods: a thousand pods take under a minute, and their nodes don't all call the store at once."""
AGAIN_S = 5.0
MOOT_S = 90.0
"""Seconds after which a pod is not tried again, since the kubelet has passed the keys by itself by then."""


class Announcer:
    """See the module. Secrets are handled one after another, so that PACE_S holds for all pods."""

    def __init__(
        self, client: Client, uses: Uses, pace_s: float = PACE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._uses = uses
        self._pace_s = pace_s
        self._clock = clock
        self._queue = WorkQueue()
        self._rotated: dict[SecretRef, tuple[str, float]] = {}

    def rotated(self, secret: SecretRef, version: str) -> None:
        """Queue the Secret, so that its pods are annotated with this version."""
        self._rotated[secret] = version, self._clock() + MOOT_S
        self._queue.add((secret.namespace, secret.name))

    async def run(self) -> None:
        """Annotate the pods of queued Secrets, forever."""
        while True:
            key = await self._queue.get()
            secret = SecretRef(namespace=key[0], name=key[1])
            version, moot_at = self._rotated[secret]
            try:
                await self.announce(secret, version)
            except (ApiError, Unavailable, LeaseLost) as error:
                # A replica that lost the Lease may get it back soon; another leader annotates them by itself.
                log.warning(
                    "not all pods of a rotated Secret were told", extra=fields(secret=_place(secret), error=error)
                )
                if self._clock() < moot_at:
                    self._queue.add_after(key, AGAIN_S)
            self._queue.done(key)
            if not self._queue.awaits(key):
                del self._rotated[secret]

    async def announce(self, secret: SecretRef, version: str) -> None:
        """Annotate the pods that mount with this Secret. Errors: ApiError, Unavailable, LeaseLost: then call again."""
        told = 0
        for namespace, claims in _by_namespace(self._uses.of(secret)).items():
            inline = secret.name if namespace == secret.namespace else ""
            pods = await self._client.list(PODS, namespace, NOT_ENDED)
            for pod in to_tell(pods, claims, inline, version):
                await self._client.merge(PODS, pod, {"metadata": {"annotations": {CREDENTIALS: version}}})
                PODS_TOLD.inc()
                told += 1
                await asyncio.sleep(self._pace_s)
        if told:
            log.info(
                "told the pods of a rotated Secret", extra=fields(secret=_place(secret), version=version, pods=told)
            )


def to_tell(pods: Iterable[Raw], claims: frozenset[str], inline: str, version: str) -> Iterator[Raw]:
    """Yield pods that have a node, one of the claims or an inline volume's Secret `inline`, and an older annotation."""
    for pod in pods:
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata or not pod["spec"].get("nodeName"):
            continue
        if not claims & claims_of(pod) and (not inline or inline not in inline_secrets_of(pod)):
            continue
        if not _knows((metadata.get("annotations") or {}).get(CREDENTIALS, ""), version):
            yield pod


def _place(secret: SecretRef) -> str:
    return f"{secret.namespace}/{secret.name}"


def _knows(annotation: str, version: str) -> bool:
    """Whether a pod's annotation, of the newest of its Secrets, is no older: versions only grow (KEP-5504)."""
    if annotation.isdecimal() and version.isdecimal():
        return int(annotation) >= int(version)
    return annotation == version


def _by_namespace(keys: Iterable[Key]) -> dict[str, frozenset[str]]:
    """Return the names of the claims by namespace: a Datastore with a Secret has a claim of its own name."""
    found: dict[str, set[str]] = {}
    for namespace, name in keys:
        found.setdefault(namespace, set()).add(name)
    return {namespace: frozenset(names) for namespace, names in found.items()}
