"""Many processes on one mount at once: nothing hangs, no error but the usual ones, and all ends in the store."""

from __future__ import annotations

import errno
import inspect
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from datastore.fuse.loop import Loop
from datastore.fuse.vfs.tree.nodes import Directory
from tests.driving import resolve
from tests.localfs import LocalFs
from tests.mounted import Client, World
from tests.patience import PATIENCE_S
from tests.promises import promise

THREADS = 8
STEPS = int(os.environ.get("THREAD_STEPS", "60"))
ENTRIES = ("create", "mkdir", "mknod", "symlink", "unlink", "rmdir")
VICTIMS = ("unlink", "rmdir", "rename")
EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.ESTALE, errno.EINVAL, errno.EBUSY
}  # fmt: skip


class Kernel:
    """The file system as a kernel and a session serve it.

    Changes of one directory's entries take turns, and so
    do the renames, the removal of a directory and changes in it, and the changes of one file's size (i_rwsem).
    """

    def __init__(self, client: Client) -> None:
        self._fs = client.fs
        self._turn = threading.Lock()
        self._inodes: dict[int, threading.Lock] = {}

    @property
    def loop(self) -> Loop:
        return self._fs.loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._fs, name)

        def call(*arguments: Any) -> Any:
            for place in self._directories(name) if name in VICTIMS else ():
                # The kernel looks a victim up first, so it has an inode to lock.
                self._served(self._fs.lookup, arguments[0], arguments[place], arguments[place + 1])
            with self._locked(name, arguments):
                return self._served(method, *arguments)

        return call

    def _served(self, method: Callable[..., Any], *arguments: object) -> Any:
        reply = method(*arguments)
        return resolve(reply) if inspect.iscoroutine(reply) else reply

    def _directories(self, name: str) -> tuple[int, ...]:
        """Which arguments of a call are the inodes that it locks."""
        return {"rename": (1, 3)}.get(name, (1,) if name in ENTRIES else (0,) if name == "write" else ())

    @contextmanager
    def _locked(self, name: str, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Take all locks of a call or none, so that there is no order to keep."""
        directories = self._directories(name)
        inodes = {int(arguments[place]) for place in directories}
        if name == "setattr":
            inodes = {int(arguments[1])}
        places = directories if name in VICTIMS else ()
        while True:
            victims = {self._found(arguments[place], arguments[place + 1]) for place in places}
            held = self._take(sorted((inodes | victims) - {0}))
            if held is not None:
                if victims == {self._found(arguments[place], arguments[place + 1]) for place in places}:
                    break
                # Another has the name by now: the kernel looks it up with the directory locked.
                for lock in held:
                    lock.release()
            time.sleep(0.0002)
        try:
            yield
        finally:
            for lock in held:
                lock.release()

    def _found(self, parent: int, name: bytes) -> int:
        node = self._fs.core.nodes.by_ino.get(parent)
        child = node.children.get(name) if isinstance(node, Directory) else None
        return 0 if child is None else child.ino

    def _take(self, inodes: list[int]) -> list[threading.Lock] | None:
        held: list[threading.Lock] = []
        with self._turn:
            for ino in inodes:
                lock = self._inodes.setdefault(ino, threading.Lock())
                if not lock.acquire(blocking=False):
                    for other in held:
                        other.release()
                    return None
                held.append(lock)
        return held


class Process(threading.Thread):
    """Random calls on few names; ends at the first error that no such call may have."""

    def __init__(self, fs: Kernel, seed: int) -> None:
        super().__init__(name=f"process-{seed}")
        self._local = LocalFs(fs)
        self._random = random.Random(seed)
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                try:
                    self._step()
                except OSError as error:
                    if error.errno not in EXPECTED:
                        raise
        except BaseException as error:
            self.failure = error

    def _path(self) -> str:
        return "/".join(self._random.choice("abc") for _ in range(self._random.randint(1, 3)))

    def _step(self) -> None:
        local, chance, path = self._local, self._random, self._path()

        def write() -> None:
            with local.opened(path, os.O_RDWR | os.O_CREAT) as file:
                file.write(chance.choice([b"", b"x" * 10, b"y" * 9000]), chance.choice([0, 0, 5000]))
                file.read()

        steps: list[Callable[[], object]] = [
            lambda: local.read(path),
            lambda: local.mkdir(path),
            lambda: local.scandir(os.path.dirname(path), plus=True),
            lambda: local.unlink(path),
            lambda: local.rmdir(path),
            lambda: local.rename(path, self._path()),
            lambda: local.chmod(path, chance.choice([0o600, 0o755])),
        ]
        chance.choice([write, write, write, *steps])()


@promise("S-29", "S-18")
@pytest.mark.parametrize("seed", range(int(os.environ.get("THREAD_SEEDS", "2"))))
def test_many_processes_on_few_names(world: World, one: Client, seed: int) -> None:
    """What the mount shows in the end is what another mount sees, and nothing is unsent."""
    chance = random.Random(seed)

    def take_a_while(index: int, method: str) -> None:
        world.clock.advance(0.0001)
        time.sleep(chance.random() * 0.001)

    one.faulty.plan = take_a_while
    kernel = Kernel(one)
    processes = [Process(kernel, seed * THREADS + number) for number in range(THREADS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(5 * PATIENCE_S)
    assert not [process.name for process in processes if process.is_alive()], "they hang"
    failures = [process.failure for process in processes if process.failure is not None]
    if failures:
        raise failures[0]
    assert resolve(one.fs.flush_all()) == []
    one.nothing_left()
    shown = one.local.tree()
    world.later()
    assert one.local.tree() == world.client().local.tree() == shown
