"""Since when a store has not answered (docs/SEMANTICS.md, S-196)."""

from __future__ import annotations

import threading
import time

import pytest

from datastore.errors import AccessDenied, StoreError, Unreachable
from datastore.fuse.store import silence
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.store.retrying import RetryingStore
from datastore.fuse.store.silence import Silence
from datastore.retry import Retrier, RetryPolicy
from tests.faulty import Fault, FaultyStore, no_faults
from tests.memorystore import MemoryStore
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise


class Store:
    """A store, its silence, and what befalls each call: an error, or waiting for an event."""

    def __init__(self) -> None:
        self.silence = Silence()
        self.faulty = FaultyStore(MemoryStore(), no_faults)
        retrier = Retrier(RetryPolicy(budget_s=0.0))
        self.retrying = RetryingStore(self.faulty, retrier, silence=self.silence)

    def ask(self, error: StoreError | None = None) -> None:
        """One request; it may fail."""
        self.faulty.plan = no_faults if error is None else lambda index, method: Fault(error)
        try:
            self.retrying.put("key", b"", WriteOptions())
        except StoreError:
            assert error is not None


@promise("S-196")
def test_a_refused_connection_is_silence_since_it_was_asked() -> None:
    store, before = Store(), time.time()
    assert store.silence.told() == {}
    store.ask()
    assert store.silence.told() == {}
    store.ask(Unreachable("connection refused"))
    first = store.silence.told()
    store.ask(Unreachable("connection refused again"))
    told = store.silence.told()
    assert before <= told["since"] == pytest.approx(first["since"], abs=0.001)
    assert told["lastAsked"] >= first["lastAsked"]
    assert told["error"] == "connection refused again"
    assert told["silentSeconds"] >= 0
    store.ask()
    assert store.silence.told() == {}


def test_a_refusal_is_an_answer() -> None:
    store = Store()
    store.ask(Unreachable("connection refused"))
    store.ask(AccessDenied("no"))
    assert store.silence.told() == {}


@promise("S-196")
def test_who_waits_for_an_answer_is_told_of_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has failed yet."""
    store, answer = Store(), threading.Event()
    monkeypatch.setattr(store.faulty.inner, "head", lambda key: answer.wait(PATIENCE_S))
    waiting = threading.Thread(target=lambda: store.retrying.head("key"))
    waiting.start()
    try:
        eventually(lambda: store.faulty.calls)
        assert store.silence.told() == {}
        monkeypatch.setattr(silence, "SILENT_S", 0.0)
        assert store.silence.told()["error"] == ""
    finally:
        answer.set()
        waiting.join()
    assert store.silence.told() == {}
