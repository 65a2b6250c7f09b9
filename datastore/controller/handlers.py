"""What kopf watches, and what each event means: take it into the cache, and put the Datastore concerned on the queue.

kopf watches, lists again when a watch breaks, logs in, and pauses all this while another replica of the peering works.
Its handlers with retries are not used: they act on what changed, and this controller acts on what is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from datastore.api.datastore import GROUP, VERSION
from datastore.api.names import MANAGED_BY, MANAGER
from datastore.controller.cache import Cache, Key, Shelf
from datastore.controller.cluster import login
from datastore.controller.desired import owner_of
from datastore.controller.heartbeat import Heartbeat
from datastore.controller.settings import Settings

Raw = Mapping[str, Any]
Wake = Callable[[Key], None]

WATCHED = (
    (GROUP, VERSION, "datastores"),
    ("", "v1", "persistentvolumeclaims"),
    ("", "v1", "persistentvolumes"),
    ("storage.k8s.io", "v1", "storageclasses"),
    ("coordination.k8s.io", "v1", "leases"),
)
"""Listed and watched; the RBAC rules have nothing more of these two verbs but the peerings."""


class Watches:
    """Keeps the cache, and wakes Datastores (`wake`) and plain claims (`wake_claim`). serves: is it our namespace."""

    def __init__(
        self, cache: Cache, heartbeat: Heartbeat, wake: Wake, wake_claim: Wake, serves: Callable[[str], bool]
    ) -> None:
        self._cache = cache
        self._heartbeat = heartbeat
        self._wake = wake
        self._wake_claim = wake_claim
        self._serves = serves

    def datastore(self, event: Raw) -> None:
        """A Datastore came, changed or went."""
        body = event["object"]
        key = _keep(self._cache.datastores, event)
        wrapped = (body.get("spec", {}).get("claim") or {}).get("name")
        if wrapped:
            self._cache.wrappers[(key[0], wrapped)] = key
        self._wake(key)

    def claim(self, event: Raw) -> None:
        """A claim: ours, one that a Datastore wraps, or a plain one of a class of ours."""
        body = event["object"]
        key = _keep(self._cache.claims, event)
        self._claimed(body)
        if body["spec"].get("storageClassName") and not body["spec"].get("volumeName"):
            self._wake_claim(key)

    def _claimed(self, body: Raw) -> None:
        """Whose claim it is wants to be looked at."""
        key = _key(body)
        if owner_of(body) or self._cache.datastores.get(key):
            self._wake(owner_of(body) or key)
        if key in self._cache.wrappers:
            self._wake(self._cache.wrappers[key])

    def volume(self, event: Raw) -> None:
        """A volume of ours. They have no namespace, so those of another controller's Datastores come along."""
        owner = owner_of(event["object"])
        if owner is not None and not self._serves(owner[0]):
            return
        _keep(self._cache.volumes, event)
        if owner is not None:
            self._wake(owner)

    def storage_class(self, event: Raw) -> None:
        """A class came, changed or went: its Datastores may be meant otherwise now, its claims may have waited."""
        _, name = _keep(self._cache.classes, event)
        for datastore in self._cache.datastores.values():
            if datastore.get("spec", {}).get("storageClassName") == name:
                self._wake(_key(datastore))
        for claim in self._cache.claims.values():
            if claim["spec"].get("storageClassName") == name and not claim["spec"].get("volumeName"):
                self._claimed(claim)
                self._wake_claim(_key(claim))

    def lease(self, event: Raw) -> None:
        """Our own heartbeat, seen by the watch."""
        self._heartbeat.seen(event["object"])


def registry(watches: Watches) -> kopf.OperatorRegistry:
    """kopf's table of who is told what."""
    made = kopf.OperatorRegistry()
    told = (watches.datastore, watches.claim, watches.volume, watches.storage_class, watches.lease)
    for (group, version, plural), tell in zip(WATCHED, told, strict=True):
        kopf.on.event(group, version, plural, registry=made, id=plural)(_handler(tell))
    kopf.on.login(registry=made)(login)
    return made


def operator_settings(settings: Settings) -> kopf.OperatorSettings:
    """kopf's settings."""
    made = kopf.OperatorSettings()
    # Neither CRDs nor namespaces are watched: what we serve is fixed, and the right to list them is not asked for.
    made.scanning.disabled = True
    made.posting.enabled = False
    made.watching.server_timeout = 240
    made.watching.connect_timeout = 10
    made.watching.chunk_size = 500
    made.networking.request_timeout = 30
    made.queueing.idle_timeout = 1.0
    made.watching.label_selectors["persistentvolumes"] = f"{MANAGED_BY}={MANAGER}"
    made.watching.field_selectors["leases"] = f"metadata.name={MANAGER}"
    made.peering.standalone = not settings.peering
    made.peering.priority = settings.priority
    made.peering.lifetime = 20
    return made


def _handler(tell: Callable[[Raw], None]) -> Any:
    async def handle(event: Raw, **_: object) -> None:
        tell(event)

    return handle


def _keep(shelf: Shelf, event: Raw) -> Key:
    body = event["object"]
    key = _key(body)
    if event["type"] == "DELETED":
        shelf.drop(key, body["metadata"]["uid"])
    else:
        shelf.put(body)
    return key


def _key(body: Raw) -> Key:
    return (body["metadata"].get("namespace", ""), body["metadata"]["name"])
