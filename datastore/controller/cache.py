"""What the watches showed: Datastores, their claims and volumes, and StorageClasses. One event loop, no locks.

Bodies are kept without managedFields, which are half of an object. An older version never replaces a newer one: our own
writes answer before the watch shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name."""


GONE_MAX = 10_000
"""So many of those that went last are remembered: an answer is late by seconds."""


def slim(body: Raw) -> dict[str, Any]:
    """The body without what nobody reads."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations:
        # kubectl keeps a whole second manifest in it.
        kept = {
            key: text for key, text in annotations.items() if key != "kubectl.kubernetes.io/last-applied-configuration"
        }
        metadata["annotations"] = kept
    return {**body, "metadata": metadata}


class Shelf:
    """Objects of one kind by namespace and name ('' for none)."""

    def __init__(self) -> None:
        self._bodies: dict[Key, dict[str, Any]] = {}
        self._gone: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def get(self, key: Key) -> dict[str, Any] | None:
        """The newest version seen."""
        return self._bodies.get(key)

    def values(self) -> list[dict[str, Any]]:
        """All of them."""
        return list(self._bodies.values())

    def put(self, body: Raw) -> None:
        """Take in a version; an older one than ours, or one of what is known to be gone, is ignored."""
        metadata = body["metadata"]
        if metadata["uid"] in self._gone:
            # The answer to our request comes after the watch has told the end.
            return
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self._bodies.get(key)
        if before is None or _version(before) <= _version(body) or before["metadata"]["uid"] != metadata["uid"]:
            self._bodies[key] = slim(body)

    def drop(self, key: Key, uid: str = "") -> None:
        """It is gone; with a uid only that one."""
        before = self._bodies.get(key)
        if before is not None and uid in ("", before["metadata"]["uid"]):
            del self._bodies[key]
        if uid:
            self._gone[uid] = None
            if len(self._gone) > GONE_MAX:
                del self._gone[next(iter(self._gone))]


class Cache:
    """One Shelf a kind."""

    def __init__(self) -> None:
        self.datastores = Shelf()
        self.claims = Shelf()
        self.volumes = Shelf()
        self.classes = Shelf()
        self.wrappers: dict[Key, Key] = {}
        """Claim -> a Datastore that wraps it."""

    def class_of(self, claim: Raw | None) -> dict[str, Any] | None:
        """The StorageClass that a claim names."""
        return self.classes.get(("", claim["spec"].get("storageClassName") or "")) if claim else None


def _version(body: Raw) -> int:
    """Comparable as numbers since Kubernetes 1.35 (KEP-5504); a server that counts otherwise counts as new."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 1 << 63
