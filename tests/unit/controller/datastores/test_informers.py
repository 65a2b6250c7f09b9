"""datastore.controller.datastores.informers: whose turn it is after an event."""

from __future__ import annotations

from typing import Any

import pytest

from datastore.controller.datastores.informers import Informers
from datastore.controller.runtime.queue import Key

KEY = ("team", "digits")


def body(kind: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": "digits", "uid": kind, "resourceVersion": str(version)}
    return {"metadata": metadata, **more}


BODIES: dict[str, dict[str, Any]] = {
    "datastores": {"spec": {"s3": {"bucket": "b"}}},
    "persistentvolumeclaims": {"spec": {"storageClassName": "fast"}},
}


@pytest.mark.parametrize("plural", BODIES)
def test_a_listing_without_changes_queues_no_object(plural: str) -> None:
    """kopf lists everything again every four minutes."""
    woken: list[Key] = []
    informers = Informers(woken.append, woken.append, lambda namespace: True)
    tell = next(watch.tell for watch in informers.watches() if watch.resource.plural == plural)
    turns = []
    for event, version in ((None, 5), (None, 5), ("MODIFIED", 6), (None, 6), (None, 7), ("DELETED", 8)):
        tell({"type": event, "object": body(plural, version, **BODIES[plural])})
        turns.append(len(woken))
    assert turns == [1, 1, 2, 2, 3, 4]
    assert set(woken) == {KEY}
