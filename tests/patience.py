"""Waiting for what happens in its own time, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
POLL_S = 0.01


def eventually(check: Callable[[], T], what: str = "it did not happen", patience_s: float = PATIENCE_S) -> T:
    """The first true answer of `check`, asked again and again; AssertionError after patience_s."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(POLL_S)
