"""Kills a save with SIGKILL before its n-th step, for every n, and checks what is left.

`python -m tests.fault.modelkills`. A step is a request to the bucket, or a system call that changes a directory. One
process without threads forks a child for each job, so that the interpreter starts only once. Arguments: the home
("directory", or a server's endpoint and keys as JSON), "disk" or "bucket" for where the source is, and a directory to
work in. Prints the number of steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from datastore.models import transfer
from datastore.models.directory import DirectoryTree
from datastore.models.manifest import Entry
from datastore.models.progress import Progress
from datastore.models.registry import MARKER, Models
from datastore.models.saving import save
from datastore.models.storage import CHUNK_BYTES, ReadableTree, chunk_bytes
from datastore.models.verifying import verify
from tests.memorystore import HookedStore
from tests.modelstores import Home, directory_home, server_home, wish
from tests.servers import Server

T = TypeVar("T")

SYSTEM_CALLS = ("open", "write", "rename", "link", "symlink", "unlink", "mkdir", "fsync", "fchmod", "chmod", "rmdir")
FOLDER = "source"


class Steps:
    """Counts steps, and kills this process instead of the step after the `last`-th."""

    def __init__(self, last: int) -> None:
        self.done = 0
        self._last = last
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self.done += 1
            if self.done > self._last:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()


class Mortal(HookedStore):
    """A store that counts a step before each request."""

    def __init__(self, inner: Any, steps: Steps) -> None:
        super().__init__(inner)
        self._steps = steps

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._steps.step()
        return await call()


def mortal_system_calls(steps: Steps) -> None:
    """Count a step before each system call that changes something."""
    for name in SYSTEM_CALLS:
        real = getattr(os, name)

        def counted(*arguments: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            if name != "open" or arguments[1] & os.O_CREAT:
                steps.step()
            return real(*arguments, **options)

        setattr(os, name, counted)


def plant_small(root: Path) -> None:
    """Make few paths, but of each kind: a large file in parts, a small one, an empty directory, a link."""
    (root / "assets").mkdir(parents=True)
    (root / "d").mkdir()
    (root / "d" / "small").write_bytes(b"small")
    (root / "weights").write_bytes(bytes(range(256)) * ((2 * CHUNK_BYTES + 256) // 256))
    (root / "latest").symlink_to("weights")


def source_of(home: Home, root: Path, kind: str) -> ReadableTree:
    return DirectoryTree(root / FOLDER) if kind == "disk" else home.data()


def fill(home: Home, root: Path) -> None:
    """Copy the source into the home's data: another client's objects, or a directory."""
    tree, local = home.data(), DirectoryTree(root / FOLDER)
    tree.begin()
    nodes = local.scan()
    for node in nodes:
        if node.kind == "directory":
            tree.make(Entry(node.path, "directory", node.mode or 0), bare=True)
    for node in nodes:
        if node.kind == "symlink":
            tree.make(Entry(node.path, "symlink", target=node.target), bare=False)
        elif node.kind == "file":
            with tree.write(node.path, node.mode or 0, node.size) as sink:
                step = chunk_bytes(node.size)
                for start in range(0, node.size, step):
                    sink.write(local.read(node, start, min(start + step, node.size)).body)


def attempt(home: Home, root: Path, kind: str, steps: Steps) -> None:
    """Run one save in this process."""
    source = source_of(home, root, kind)
    if home.root is not None:
        storage = home.storage()
        mortal_system_calls(steps)
    else:
        storage = home.storage(lambda store: Mortal(store, steps))
    save(Models(storage, who="child"), source, wish(save_id="job"), Progress())


def look(home: Home, when: str) -> None:
    """Check that every version is whole."""
    models = home.models()
    for version in models.versions("digits"):
        _, damages = verify(models, "digits", version.version, Progress())
        assert not damages, f"{when}: {damages}"


def collect(home: Home) -> None:
    """Do what `gc --delete` does when every other process is dead."""
    models = home.models()
    for garbage in list(models.garbage("digits", stale_s=-1)):
        models.remove_garbage(garbage)


def expected(home: Home) -> list[str]:
    """Return the paths that may be in the store: the layout's document, manifests, and the files of versions."""
    models = home.models()
    paths = [MARKER]
    for number in models.numbers("digits"):
        paths.append(f"digits/{number}.json")
    for version in models.versions("digits"):
        manifest = models.manifest("digits", version.version)
        at = f"digits/{version.version}"
        for entry in manifest.entries:
            if entry.kind == "file":
                paths.append(f"{at}/{entry.path}")
            elif entry.kind == "symlink":
                paths.append(f"{at}/{entry.path}" + ("" if home.root is not None else ".rclonelink"))
            elif home.root is None and entry.path == "assets":
                paths.append(f"{at}/assets/")
    return sorted(paths)


def forked(job: Callable[[], object]) -> int:
    """Run a job in a child; return its status as of waitpid(2). An exception is printed and gives exit status 1."""
    child = os.fork()
    if child == 0:
        try:
            job()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1]


def in_a_child(job: Callable[[], None]) -> None:
    """Run a job that starts threads in a child: a lock that a thread holds while we fork (OpenSSL's) stays taken."""
    assert forked(job) == 0


def aftermath(home: Home, root: Path, kind: str, n: int) -> None:
    """Check what is left of a save that was killed before its step n, and that the save can be repeated."""
    look(home, f"n={n}, killed")
    if n % 2:
        collect(home)
        look(home, f"n={n}, collected")
    models = home.models()
    save(models, source_of(home, root, kind), wish(save_id="job"), Progress())
    look(home, f"n={n}, repeated")
    assert len(list(models.versions("digits"))) == 1, f"n={n}: the save was done twice, or not at all"
    collect(home)
    for folder in ("digits", "digits/aliases", ""):
        sweep_now(home, folder)
    found = home.everything()
    assert found == expected(home), f"n={n}: {sorted(set(found) ^ set(expected(home)))}"


def sweep(homes: Callable[[int], AbstractContextManager[Home]], root: Path, kind: str) -> int:
    """Kill the save before every step n until it ends by itself; return how many steps it has."""
    for n in range(10_000):
        with homes(n) as home:
            assert kind == "disk" or forked(partial(fill, home, root)) == 0
            status = forked(partial(attempt, home, root, kind, Steps(n)))
            killed = os.WIFSIGNALED(status)
            assert killed or status == 0, f"n={n}: the save failed"
            assert forked(partial(aftermath, home, root, kind, n)) == 0
            if not killed:
                return n
    raise AssertionError("a save has fewer steps")


def sweep_now(home: Home, folder: str) -> None:
    """Remove the temporary files of dead writers, which in production are left for two minutes."""
    if home.root is not None:
        for each in (home.root / "models" / folder).glob(".*.*"):
            if each.name.endswith((".tmp", ".lock", ".broken")):
                each.unlink()


@contextmanager
def _directory(root: Path, n: int) -> Iterator[Home]:
    (root / str(n)).mkdir()
    with directory_home(root / str(n)) as home:
        yield home


def main() -> None:
    where, kind, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    transfer.FILES_AT_ONCE = 1
    plant_small(root / FOLDER)
    if where == "directory":
        steps = sweep(lambda n: _directory(root, n), root, kind)
    else:
        server = Server(**json.loads(where))
        steps = sweep(lambda n: server_home(server, in_a_child), root, kind)
    sys.stdout.write(f"{steps}\n")


if __name__ == "__main__":
    main()
