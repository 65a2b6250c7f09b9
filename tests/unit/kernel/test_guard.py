"""What the supervisor of a mount hears from who started it (supervisor/guard.py)."""

from __future__ import annotations

import socket

from datastore import frames
from datastore.fuse.supervisor.guard import Guard
from tests.promises import promise


@promise("S-230")
def test_of_several_specifications_the_newest_counts() -> None:
    """A server that replaces another one begins with what was said last."""
    ours, theirs = socket.socketpair()
    guard = Guard(theirs.detach())
    assert guard.news() is None
    for text in ("first", "second", "third"):
        frames.send(ours, {"spec": text})
    assert guard.news() == "third"
    assert guard.news() is None
    frames.send(ours, {"spec": "last"})
    ours.close()
    assert guard.news() == "last"
    assert guard.news() is None
