"""Since when a store has not answered (docs/SEMANTICS.md, S-196)."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from datastore.errors import (
    AccessDenied,
    BucketNotFound,
    ClockSkew,
    CredentialsInvalid,
    NotFound,
    ObjectLocked,
    OutOfSpace,
    PreconditionFailed,
    StoreError,
    Unreachable,
)
from datastore.fuse.loop import now
from datastore.fuse.store import metrics
from datastore.fuse.store.base import WriteOptions
from datastore.mounting.silence import state_words, storage_words
from tests.clock import ManualClock
from tests.driving import resolve
from tests.faulty import Fault, FaultyStore, no_faults
from tests.memorystore import MemoryStore, tried_once
from tests.patience import eventually, passed
from tests.promises import promise


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    played = SimpleNamespace(monotonic=made.monotonic, time=lambda: made.time_ns() / 1e9)
    monkeypatch.setattr(metrics, "time", played)
    return made


class Store:
    """A store, its silence, and what befalls each call: an error, or waiting for an event."""

    def __init__(self) -> None:
        self.faulty = FaultyStore(MemoryStore(), no_faults)
        self.retrying = tried_once(self.faulty)
        self.silence = self.retrying.metrics.silence

    def ask(self, error: StoreError | None = None) -> None:
        """One request; it may fail."""
        self.faulty.plan = no_faults if error is None else lambda index, method: Fault(error)
        try:
            now(self.retrying.put("key", b"", WriteOptions()))
        except StoreError:
            assert error is not None


@promise("S-196")
def test_a_refused_connection_is_silence_since_it_was_asked(clock: ManualClock) -> None:
    store = Store()
    assert store.silence.told() == {}
    store.ask()
    assert store.silence.told() == {}
    clock.advance(7.0)
    began_s = clock.time_ns() / 1e9
    store.ask(Unreachable("connection refused"))
    clock.advance(4.0)
    store.ask(Unreachable("connection refused again"))
    clock.advance(1.0)
    assert store.silence.told() == {
        "since": began_s,
        "lastAsked": began_s + 4.0,
        "silentSeconds": 5.0,
        "error": "connection refused again",
    }
    store.ask()
    assert store.silence.told() == {}


@pytest.mark.parametrize("refusal", [NotFound("no"), PreconditionFailed("no"), ObjectLocked("no"), OutOfSpace("no")])
def test_a_refusal_is_an_answer(refusal: StoreError) -> None:
    """Of one object, or of one write, it says nothing about the others."""
    store = Store()
    store.ask(Unreachable("connection refused"))
    store.ask(refusal)
    assert store.silence.told() == {}


@promise("S-196")
@pytest.mark.parametrize("kind", [AccessDenied, BucketNotFound, ClockSkew, CredentialsInvalid])
def test_who_is_refused_access_is_told_since_when(clock: ManualClock, kind: type[StoreError]) -> None:
    """Until a request succeeds. Silence goes before it."""
    store = Store()
    store.ask()
    began_s = clock.time_ns() / 1e9
    store.ask(kind("no"))
    clock.advance(4.0)
    store.ask(kind("still no"))
    clock.advance(1.0)
    told = store.silence.told()
    assert told == {"since": began_s, "lastAsked": began_s + 4.0, "refuses": True, "error": "still no"}
    assert state_words({"state": "mounted", "storage": told}).startswith("mounted, storage has refused access since ")
    assert storage_words({"storage": told}).endswith(": still no")
    store.ask(Unreachable("connection refused"))
    assert store.silence.told()["error"] == "connection refused"
    store.ask(kind("no again"))
    assert store.silence.told()["since"] == began_s
    store.ask()
    assert store.silence.told() == {}


@promise("S-196")
@pytest.mark.parametrize("uploads", [False, True])
def test_who_waits_for_an_answer_is_told_of_after_a_while(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, uploads: bool
) -> None:
    """Nothing has failed yet. Over a slow line a large body is on its way for longer."""
    store, answer = Store(), threading.Event()

    async def wait(*_arguments: object) -> None:
        await passed(answer)

    monkeypatch.setattr(store.faulty.inner, "head", wait)
    monkeypatch.setattr(store.faulty.inner, "put", wait)
    asked = store.retrying.put("key", bytes(8 << 20), WriteOptions()) if uploads else store.retrying.head("key")
    waiting = threading.Thread(target=resolve, args=(asked,))
    waiting.start()
    try:
        eventually(lambda: store.faulty.calls)
        assert store.silence.told() == {}
        clock.advance(metrics.SILENT_S)
        assert store.silence.told().get("error") == (None if uploads else "")
        if uploads:
            store.silence.failed(Unreachable("connection reset"))
            assert store.silence.told()["error"] == "connection reset"
    finally:
        answer.set()
        waiting.join()
    assert store.silence.told() == {}
