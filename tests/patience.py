"""Waiting for an event, for a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from datastore.fuse.loop import pause

T = TypeVar("T")

PATIENCE_S = 60.0
POLL_S = 0.01


def eventually(check: Callable[[], T], what: str = "it did not happen", patience_s: float = PATIENCE_S) -> T:
    """Call `check` repeatedly and return its first true answer. Errors: AssertionError after patience_s."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(POLL_S)


async def passed(gate: threading.Event) -> None:
    """Wait until the gate is open, without blocking the loop. Errors: AssertionError when it stays closed."""
    deadline = time.monotonic() + PATIENCE_S
    while not gate.is_set():
        assert time.monotonic() < deadline, "the test left the gate closed"
        await pause(0.001)
