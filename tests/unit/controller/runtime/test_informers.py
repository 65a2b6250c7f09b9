"""datastore.controller.runtime.informers."""

from __future__ import annotations

from typing import Any

from datastore.controller.runtime.informers import InformerStore


def body(version: int, uid: str = "u", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a", "namespace": "n", "uid": uid, "resourceVersion": str(version), **more}}


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = InformerStore()
    store.put(body(5, managedFields=["half of an object"]))
    store.put(body(4, labels={"old": "1"}))
    assert store.get(("n", "a")) == body(5)
    store.put(body(6, uid="another"))
    store.drop(("n", "a"), "u")
    assert len(store) == 1
    store.drop(("n", "a"), "another")
    assert store.values() == []


def test_a_late_answer_does_not_revive_a_deleted_object() -> None:
    store = InformerStore()
    store.put(body(5))
    store.drop(("n", "a"), "u")
    store.put(body(6, deletionTimestamp="2026-01-31T12:00:00Z"))
    assert store.get(("n", "a")) is None
    store.put(body(7, uid="next"))
    assert store.get(("n", "a")) == body(7, uid="next")


def test_a_listing_of_what_is_known_repeats() -> None:
    store = InformerStore()
    assert not store.repeats({"type": None, "object": body(5)})
    store.take({"type": None, "object": body(5)})
    assert store.repeats({"type": None, "object": body(5)})
    for event in ({"type": "MODIFIED", "object": body(5)}, {"type": None, "object": body(6)}):
        assert not store.repeats(event)
    assert not store.repeats({"type": None, "object": body(5, uid="another")})
