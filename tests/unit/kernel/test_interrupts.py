"""is_ended: only a caller that is being ended is let go."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from datastore.fuse.kernel.callers import is_ended


def caller(proc: Path, *, thread: int = 0, shared: int = 0, blocked: int = 0) -> int:
    (proc / "77").mkdir()
    text = f"Name:\tx\nSigQ:\t1/2\nSigPnd:\t{thread:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n"
    (proc / "77" / "status").write_text(text)
    return 77


def bit(number: signal.Signals) -> int:
    return 1 << (number - 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_caller_that_is_ended_is_let_go(tmp_path: Path, number: signal.Signals) -> None:
    assert is_ended(caller(tmp_path, shared=bit(number)), tmp_path)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGPROF, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH])
def test_a_timer_or_a_childs_end_is_not_a_wish_to_leave(tmp_path: Path, number: signal.Signals) -> None:
    assert is_ended(caller(tmp_path, thread=bit(number)), tmp_path) is False


def test_a_blocked_signal_does_not_count(tmp_path: Path) -> None:
    pid = caller(tmp_path, shared=bit(signal.SIGTERM), blocked=bit(signal.SIGTERM))
    assert is_ended(pid, tmp_path) is False


def test_of_a_caller_that_can_not_be_seen_nothing_is_known(tmp_path: Path) -> None:
    assert is_ended(0, tmp_path) is None
    assert is_ended(123, tmp_path) is None
