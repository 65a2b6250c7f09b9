"""The same random calls on a mount and on a local directory: what they answer and what they leave is the same.

In between time passes, the mount is unmounted or its process dies, and everything that was closed must still be there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from datastore.fuse.ops import SetAttr
from tests.localfs import File
from tests.mounted import Client, World

NAMES = [b"a", b"b", b"c\xff", b"x.rclonelink"]
names = st.sampled_from(NAMES)
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)
contents = st.binary(max_size=20) | st.integers(1, 3).map(lambda blocks: b"z" * (blocks * 4096 + 1))
offsets = st.sampled_from([0, 1, 10, 4095, 4096, 9000])
Tree = dict[bytes, object]


class DiskMachine(RuleBasedStateMachine):
    """A mount beside a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = TemporaryDirectory()
        root = Path(self._scratch.name)
        (root / "disk").mkdir()
        self.disk = os.fsencode(root / "disk")
        self.world = World(root / "mounts")
        self.client: Client = self.world.client()
        self.open: list[tuple[File, int]] = []

    def both(self, ours: Callable[[], object], theirs: Callable[[], object], *over: bytes) -> None:
        """The two calls end alike. over: paths; those through a link are left out, for only a kernel follows links."""
        if any(self.is_link(os.path.dirname(path)) for path in over):
            return
        results: list[object] = []
        for call in (theirs, ours):
            try:
                results.append(call())
            except OSError as error:
                results.append(os.strerror(error.errno or 0))
        assert results[0] == results[1]

    def at(self, path: bytes) -> bytes:
        return os.path.join(self.disk, path)

    # -- calls

    @rule(path=paths)
    def mkdir(self, path: bytes) -> None:
        self.both(lambda: self.client.local.mkdir(path), lambda: os.mkdir(self.at(path)), path)

    @rule(path=paths)
    def rmdir(self, path: bytes) -> None:
        self.both(lambda: self.client.local.rmdir(path), lambda: os.rmdir(self.at(path)), path)

    @rule(path=paths)
    def unlink(self, path: bytes) -> None:
        self.both(lambda: self.client.local.unlink(path), lambda: os.unlink(self.at(path)), path)

    @rule(path=paths, text=st.binary(min_size=1, max_size=20).filter(lambda text: b"\0" not in text))
    def symlink(self, path: bytes, text: bytes) -> None:
        self.both(lambda: self.client.local.symlink(text, path), lambda: os.symlink(text, self.at(path)), path)

    @rule(old=paths, new=paths)
    def rename(self, old: bytes, new: bytes) -> None:
        self.both(lambda: self.client.local.rename(old, new), lambda: os.rename(self.at(old), self.at(new)), old, new)

    @rule(path=paths, content=contents, offset=offsets, flags=st.sampled_from([0, os.O_TRUNC, os.O_EXCL]))
    def write(self, path: bytes, content: bytes, offset: int, flags: int) -> None:
        def ours() -> None:
            with self.client.local.opened(path, os.O_RDWR | os.O_CREAT | flags) as file:
                file.write(content, offset)

        def theirs() -> None:
            fd = os.open(self.at(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)
            try:
                os.pwrite(fd, content, offset)
            finally:
                os.close(fd)

        if not self.is_link(path):
            self.both(ours, theirs)

    @rule(path=paths, size=offsets)
    def truncate(self, path: bytes, size: int) -> None:
        if not self.is_link(path):
            self.both(lambda: self.client.local.truncate(path, size), lambda: os.truncate(self.at(path), size))

    @rule(path=paths, mode=st.integers(0, 0o7777), time_ns=st.integers(0, 1 << 60))
    def setattr(self, path: bytes, mode: int, time_ns: int) -> None:
        def theirs() -> None:
            os.chmod(self.at(path), mode)
            os.utime(self.at(path), ns=(time_ns, time_ns))

        def ours() -> None:
            self.client.local.setattr(path, SetAttr(mode=mode, atime_ns=time_ns, mtime_ns=time_ns))

        if not self.is_link(path):
            self.both(ours, theirs)

    # -- files that stay open

    @rule(path=paths)
    def keep_open(self, path: bytes) -> None:
        if self.is_link(path) or os.path.isdir(self.at(path)) or len(self.open) >= 3:
            return
        try:
            fd = os.open(self.at(path), os.O_RDWR)
        except OSError:
            return
        self.open.append((self.client.local.open(path, os.O_RDWR), fd))

    @rule(which=st.integers(0, 2), content=contents, offset=offsets)
    def write_open(self, which: int, content: bytes, offset: int) -> None:
        if which < len(self.open):
            file, fd = self.open[which]
            self.both(lambda: file.write(content, offset), lambda: os.pwrite(fd, content, offset))

    @rule(which=st.integers(0, 2), size=offsets)
    def truncate_open(self, which: int, size: int) -> None:
        if which < len(self.open):
            file, fd = self.open[which]
            self.both(lambda: file.truncate(size), lambda: os.ftruncate(fd, size))

    @rule(which=st.integers(0, 2))
    def fsync_open(self, which: int) -> None:
        if which < len(self.open):
            self.open[which][0].fsync()

    @rule(which=st.integers(0, 2))
    def close(self, which: int) -> None:
        if which < len(self.open):
            file, fd = self.open.pop(which)
            self.both(file.close, lambda: os.close(fd))

    # -- time, unmount, death

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(clean=st.booleans())
    def mount_again(self, clean: bool) -> None:
        """What was closed is there, and so is what was only written: it is sent at the next mount."""
        for file, fd in self.open:
            os.close(fd)
            if clean:
                file.close()
        self.open = []
        if clean:
            self.client.unmount()
        self.client = self.client.again()

    @invariant()
    def all_is_alike(self) -> None:
        assert self.tree_here() == self.tree_there()
        for file, fd in self.open:
            assert file.read() == os.pread(fd, 1 << 20, 0)
            assert (file.stat().size, file.stat().nlink) == (os.fstat(fd).st_size, os.fstat(fd).st_nlink)

    @invariant()
    def another_mount_sees_what_is_closed(self) -> None:
        if self.open:
            return
        other = self.world.client()
        assert self.tree_of(other) == self.tree_there()
        other.kill()

    def is_link(self, path: bytes) -> bool:
        """Whether the path leads over a symbolic link."""
        parts = path.split(b"/") if path else []
        return any(os.path.islink(self.at(b"/".join(parts[: end + 1]))) for end in range(len(parts)))

    def tree_here(self) -> Tree:
        return self.tree_of(self.client)

    def tree_of(self, client: Client, path: bytes = b"") -> Tree:
        tree: Tree = {}
        for name, kind in client.local.scandir(path, plus=len(self.open) % 2 == 0):
            below = path + b"/" * bool(path) + name
            attr = client.local.stat(below)
            assert kind == stat.S_IFMT(attr.mode)
            if kind == stat.S_IFDIR:
                tree[name] = (stat.S_IMODE(attr.mode), self.tree_of(client, below))
            elif kind == stat.S_IFLNK:
                tree[name] = client.local.readlink(below)
            else:
                tree[name] = (stat.S_IMODE(attr.mode), attr.size, client.local.read(below))
        return tree

    def tree_there(self, path: bytes = b"") -> Tree:
        tree: Tree = {}
        for entry in os.scandir(self.at(path)):
            facts = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                tree[entry.name] = (stat.S_IMODE(facts.st_mode), self.tree_there(os.path.join(path, entry.name)))
            elif stat.S_ISLNK(facts.st_mode):
                tree[entry.name] = os.readlink(entry.path)
            else:
                tree[entry.name] = (
                    stat.S_IMODE(facts.st_mode),
                    facts.st_size,
                    Path(os.fsdecode(entry.path)).read_bytes(),
                )
        return tree

    def teardown(self) -> None:
        for _, fd in self.open:
            os.close(fd)
        self.world.close()
        self._scratch.cleanup()


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(
    max_examples=int(os.environ.get("DISK_EXAMPLES", "15")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
