"""The lock between uploads and renames of directories."""

from __future__ import annotations

import threading

import pytest

from datastore.errors import DeadlineExceeded
from datastore.fuse.vfs.tree.treelock import TreeLock
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise


class Holder:
    """A thread that holds the lock until it is told to let go."""

    def __init__(self, lock: TreeLock, *, alone: bool) -> None:
        self.has_it = threading.Event()
        self.let_go = threading.Event()
        self._manager = lock.exclusive() if alone else lock.shared()
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()

    def _hold(self) -> None:
        with self._manager:
            self.has_it.set()
            self.let_go.wait(PATIENCE_S)

    def end(self) -> None:
        self.let_go.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@promise("S-26")
def test_one_alone() -> None:
    """While a directory is renamed nobody uploads, and the other way round."""
    lock = TreeLock(deadline_s=0.01)
    holder = Holder(lock, alone=True)
    assert holder.has_it.wait(PATIENCE_S)
    for take in (lock.shared, lock.exclusive):
        with pytest.raises(DeadlineExceeded), take():
            pass
    holder.end()
    holder = Holder(lock, alone=False)
    assert holder.has_it.wait(PATIENCE_S)
    with pytest.raises(DeadlineExceeded), lock.exclusive():
        pass
    holder.end()
    with lock.exclusive():
        pass


@promise("S-26")
def test_a_rename_is_not_starved() -> None:
    """Who waits to be alone comes before newcomers."""
    lock = TreeLock(deadline_s=PATIENCE_S)
    first = Holder(lock, alone=False)
    assert first.has_it.wait(PATIENCE_S)
    rename = Holder(lock, alone=True)
    eventually(lambda: lock._waiting == 1)
    newcomer = Holder(lock, alone=False)
    assert not newcomer.has_it.wait(0.01)
    first.end()
    assert rename.has_it.wait(PATIENCE_S)
    rename.end()
    assert newcomer.has_it.wait(PATIENCE_S)
    newcomer.end()


@promise("S-26", "S-18")
def test_who_gave_up_waiting_lets_those_behind_go_on_at_once() -> None:
    """Not only when the next one lets go: that may be the upload of a large file."""
    lock = TreeLock(deadline_s=0.2)
    upload = Holder(lock, alone=False)
    assert upload.has_it.wait(PATIENCE_S)
    gave_up = threading.Event()

    def rename() -> None:
        with pytest.raises(DeadlineExceeded), lock.exclusive():
            pass
        gave_up.set()

    thread = threading.Thread(target=rename)
    thread.start()
    eventually(lambda: lock._waiting or gave_up.is_set())
    lock._deadline_s = 10 * PATIENCE_S
    behind = Holder(lock, alone=False)
    assert gave_up.wait(PATIENCE_S)
    assert behind.has_it.wait(PATIENCE_S / 2)  # the upload ends by itself after PATIENCE_S
    for holder in (behind, upload):
        holder.end()
    thread.join(PATIENCE_S)
