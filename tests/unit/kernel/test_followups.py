"""The second request that the kernel makes by itself belongs to the call of the first (S-109)."""

from __future__ import annotations

from datastore.errors import NotFound, Unreachable
from datastore.fuse.kernel import abi
from datastore.fuse.kernel.callers import FollowUps
from datastore.fuse.kernel.dispatch import Header
from datastore.fuse.ops import Ino
from datastore.retry import Call


def header(opcode: int = abi.LOOKUP, *, node: int = 7, thread: int = 100) -> Header:
    return (40, opcode, 1, Ino(node), 0, 0, thread, 0, 0)


def failed(which: Header, call: Call, *, error: Exception | None = None, first: bool = True) -> FollowUps:
    follow_ups = FollowUps()
    follow_ups.failed(which, call, error or Unreachable("gone"), first=first, now=60.0)
    return follow_ups


def test_a_name_that_is_looked_up_again_at_once_is_of_the_same_call() -> None:
    call = Call(0.0)
    follow_ups = failed(header(), call)
    assert follow_ups.call_of(header(), 60.1) is call


def test_only_the_next_one() -> None:
    """A program that tries again itself has made a new call."""
    follow_ups = failed(header(), call := Call(0.0))
    follow_ups.call_of(header(), 60.1)
    again = follow_ups.call_of(header(), 60.2)
    assert again is not call
    assert again.began == 60.2
    follow_ups.failed(header(), call, Unreachable("gone"), first=False, now=60.3)
    assert follow_ups.call_of(header(), 60.4) is not call


def test_not_another_thread_node_or_kind_of_request_nor_later() -> None:
    call = Call(0.0)
    for other in (header(thread=101), header(node=8), header(abi.OPEN)):
        assert failed(header(), call).call_of(other, 60.1) is not call
    assert failed(header(), call).call_of(header(), 61.5) is not call


def test_not_after_a_refusal_nor_where_the_thread_is_not_known() -> None:
    call = Call(0.0)
    assert failed(header(), call, error=NotFound("no")).call_of(header(), 60.1) is not call
    assert failed(header(thread=0), call).call_of(header(thread=0), 60.1) is not call


def test_few_are_remembered() -> None:
    follow_ups = FollowUps()
    for thread in range(1, 10_000):
        follow_ups.failed(header(thread=thread), Call(0.0), Unreachable("gone"), first=True, now=60.0)
    assert len(follow_ups.remembered) <= 256
