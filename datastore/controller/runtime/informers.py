"""Informer stores: the objects of each kind that the watches have shown. For one event loop, without locks.

Bodies are kept without managedFields, which are half of an object. An older version never replaces a newer one, because
the watch may show an older version after the answer to a write of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastore.controller.runtime.queue import Key

Raw = Mapping[str, Any]

GONE_MAX = 10_000
"""How many uids of the objects deleted last are remembered: an answer is late by seconds only."""


def key_of(body: Raw) -> Key:
    """Namespace ('' for none) and name of an object."""
    return (body["metadata"].get("namespace", ""), body["metadata"]["name"])


def slim(body: Raw) -> dict[str, Any]:
    """Return the body without managedFields and kubectl's own annotation, which nobody reads."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations:
        # kubectl keeps a second copy of the whole manifest in this annotation.
        kept = {
            key: text for key, text in annotations.items() if key != "kubectl.kubernetes.io/last-applied-configuration"
        }
        metadata["annotations"] = kept
    return {**body, "metadata": metadata}


class InformerStore:
    """Objects of one kind by namespace and name ('' for none)."""

    def __init__(self) -> None:
        self._bodies: dict[Key, dict[str, Any]] = {}
        self._gone: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def get(self, key: Key) -> dict[str, Any] | None:
        """Return the newest version seen, or None."""
        return self._bodies.get(key)

    def values(self) -> list[dict[str, Any]]:
        """Return all objects."""
        return list(self._bodies.values())

    def repeats(self, event: Raw) -> bool:
        """Whether the event lists a version that is known: kopf lists all objects again whenever a watch has ended."""
        before = self._bodies.get(key_of(event["object"]))
        return event["type"] is None and before is not None and _identity(before) == _identity(event["object"])

    def take(self, event: Raw) -> Key:
        """Store the object of a watch event; return its key."""
        body = event["object"]
        key = key_of(body)
        if event["type"] == "DELETED":
            self.drop(key, body["metadata"]["uid"])
        else:
            self.put(body)
        return key

    def put(self, body: Raw) -> None:
        """Store a version of an object, unless a newer one is known or the object is known to be gone."""
        metadata = body["metadata"]
        if metadata["uid"] in self._gone:
            # The answer to a request of ours came after the watch had shown the deletion.
            return
        key = key_of(body)
        before = self._bodies.get(key)
        if before is None or _version(before) <= _version(body) or before["metadata"]["uid"] != metadata["uid"]:
            self._bodies[key] = slim(body)

    def drop(self, key: Key, uid: str = "") -> None:
        """Drop an object that is gone; with a uid, only the object that has this uid."""
        before = self._bodies.get(key)
        if before is not None and uid in ("", before["metadata"]["uid"]):
            del self._bodies[key]
        if uid:
            self._gone[uid] = None
            if len(self._gone) > GONE_MAX:
                del self._gone[next(iter(self._gone))]


def _identity(body: Raw) -> tuple[str, str | None]:
    return body["metadata"]["uid"], body["metadata"].get("resourceVersion")


def _version(body: Raw) -> int:
    """Return the version, a number since Kubernetes 1.35 (KEP-5504); anything else counts as the newest."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 1 << 63
