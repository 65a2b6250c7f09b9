"""Notices within a second that a Secret in use has changed or is gone, by the metadata of Secrets alone.

Only the versions of Secrets in use are remembered. Each watch begins with all Secrets that exist, so a change between
two watches is seen as well. The watch's first bookmark follows them, within a minute: Secrets that they lack are gone.
Only the event loop may call this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from datastore.api.resources import SECRETS
from datastore.controller.datastores.effective import SecretRef
from datastore.controller.runtime.client import Client
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.reflector import keep_watching

Raw = Mapping[str, Any]

RECENT = timedelta(seconds=120)
"""A Secret that changed this shortly before it was first seen may have changed while no replica watched."""
GONE = ""
"""The version of a Secret that was deleted."""


class Uses:
    """Which Datastores use which Secret."""

    def __init__(self) -> None:
        self._secret: dict[Key, SecretRef] = {}
        self._users: dict[SecretRef, set[Key]] = {}

    def put(self, key: Key, secret: SecretRef | None) -> None:
        """Note that a Datastore now uses this Secret and no other, or with None no Secret."""
        before = self._secret.get(key)
        if before == secret:
            return
        if before is not None:
            users = self._users[before]
            users.discard(key)
            if not users:
                del self._users[before]
            del self._secret[key]
        if secret is not None:
            self._secret[key] = secret
            self._users.setdefault(secret, set()).add(key)

    def of(self, secret: SecretRef) -> frozenset[Key]:
        """The Datastores that use a Secret."""
        return frozenset(self._users.get(secret, ()))

    def secrets(self, namespace: str) -> set[SecretRef]:
        """The Secrets in use of a namespace ('' for all)."""
        return {each for each in self._users if namespace in ("", each.namespace)}


class SecretWatch:
    """Calls changed(secret, version, rotated) for each Secret in use that came, changed or went.

    version: GONE after a deletion. rotated: whether there are new keys while mounts may hold the former ones; False for
    a Secret that is merely seen for the first time.
    active: whether this replica leads.
    """

    def __init__(
        self,
        client: Client,
        uses: Uses,
        active: Callable[[], bool],
        changed: Callable[[SecretRef, str, bool], None],
    ) -> None:
        self._client = client
        self._uses = uses
        self._active = active
        self._changed = changed
        self._versions: dict[SecretRef, str] = {}

    async def run(self, namespace: str) -> None:
        """Watch one namespace ('' for all), forever."""
        await keep_watching(f"Secrets of {namespace or 'all namespaces'}", partial(self._once, namespace), self._active)

    async def _once(self, namespace: str) -> None:
        self._versions = {ref: version for ref, version in self._versions.items() if self._uses.of(ref)}
        unseen = self._uses.secrets(namespace)
        async with aclosing(self._client.watch(SECRETS, namespace)) as events:
            async for kind, metadata in events:
                if not self._active():
                    # The new leader sees the changes; this replica begins a new watch when it leads again.
                    return
                if kind == "BOOKMARK":
                    for secret in unseen:
                        self._gone(secret)
                    unseen.clear()
                else:
                    self.saw(kind, metadata)
                    unseen.discard(_reference(metadata))

    def saw(self, kind: str, metadata: Raw) -> None:
        """Handle one event. kind: ADDED, MODIFIED or DELETED."""
        ref = _reference(metadata)
        if not self._uses.of(ref):
            return
        if kind == "DELETED":
            self._gone(ref)
            return
        version, before = str(metadata["resourceVersion"]), self._versions.get(ref)
        if version == before:
            return
        self._versions[ref] = version
        rotated = before is not None or kind == "MODIFIED" or recent(metadata, datetime.now(UTC))
        self._changed(ref, version, rotated)

    def _gone(self, ref: SecretRef) -> None:
        if self._versions.get(ref) != GONE:
            self._versions[ref] = GONE
            self._changed(ref, GONE, False)


def _reference(metadata: Raw) -> SecretRef:
    return SecretRef(namespace=metadata.get("namespace", ""), name=metadata["name"])


def recent(metadata: Raw, now: datetime) -> bool:
    """Whether an object was made or changed less than RECENT ago, as far as its metadata says."""
    times = [each.get("time") for each in metadata.get("managedFields") or []]
    return any(
        text and now - datetime.fromisoformat(text) < RECENT for text in (metadata.get("creationTimestamp"), *times)
    )
