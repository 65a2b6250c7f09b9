"""The state machine: two mounts and another client on one bucket; after each step all must be as the model says."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from datastore.fuse.data import multipart
from datastore.fuse.ops import SetAttr
from tests.clock import EPOCH_NS, ManualClock
from tests.driving import resolve
from tests.memorystore import MemoryBucket
from tests.model.invariants import check
from tests.model.mounts import Mount
from tests.model.reference import HIDDEN, Inode, Object, children
from tests.model.steps import Steps
from tests.model.world import DIRECTORY, LINK, REGULAR, Side, World, resized

NAMES = [b"a", b"b", b"d", b"x", b"x.rclonelink", b"\xff", "\u00e9".encode(), "\uf0ff".encode(), "\uf02f".encode()]
SEGMENTS = ["a", "b", "d", "x", "x.rclonelink", "a.rclonelink", "\uf0ff", "\uf0c3\uf0a9", "", ".", ".."]
SIZES = [0, 1, 5, 4095, 4096, 5000, 9000]
OFFSETS = [0, 1, 5, 4096, 5000, 8192]

sides = st.integers(0, 1)
indices = st.integers(0, 40)
names = st.sampled_from(NAMES)
bodies = st.builds(lambda byte, size: bytes([byte]) * size, st.integers(97, 102), st.sampled_from(SIZES))
surprises = st.none() | bodies
"""The content that another client puts to a path between this mount's lookup and its change, or None."""
keys = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3).map("/".join)


class FilesystemMachine(Steps):
    """Paths are chosen by an index into the existing ones, modulo their number, so that shrinking keeps it valid."""

    @initialize(
        ttl_s=st.sampled_from([0.0, 1.0]),
        page_keys=st.sampled_from([1000, 1000, 3]),
        silly_copy_bytes=st.sampled_from([1 << 20, 16]),
        eager=st.booleans(),
        part_size=st.sampled_from([multipart.PART_SIZE, 2048]),
        refuses=st.sampled_from([False, False, True]),
        behind=st.sampled_from([False, False, True]),
        gives_up=st.booleans(),
    )
    def mount(
        self,
        ttl_s: float,
        page_keys: int,
        silly_copy_bytes: int,
        eager: bool,
        part_size: int,
        refuses: bool,
        behind: bool,
        gives_up: bool,
    ) -> None:
        self.refuses, self.behind, self.gives_up = refuses, behind, gives_up
        if refuses:
            part_size = multipart.PART_SIZE  # so that equal bytes have one etag, as in the model
        self.whole = part_size == multipart.PART_SIZE
        self.patches = pytest.MonkeyPatch()
        for name in ("PART_SIZE", "SINGLE_MAX"):
            self.patches.setattr(multipart, name, part_size)  # small parts are sent while files are written
        self.directory = Path(tempfile.mkdtemp(prefix="ds-model-"))
        self.clock = ManualClock()
        self.bucket = MemoryBucket(clock=self.clock.time_ns, min_part_bytes=1)
        self.ttl_s, self.eager = ttl_s, eager
        self.sides = []
        for name in ("one", "two"):
            mount = Mount(
                self.directory / name,
                self.bucket,
                self.clock,
                ttl_s=ttl_s,
                page_keys=page_keys,
                silly_copy_bytes=silly_copy_bytes,
                conflict="fail" if refuses else "lastWriterWins",
                write_back_s=5.0 if behind else 0.0,
            )
            self.sides.append(Side(mount))
        self.world = World(self.sides)
        self.acted: Side | None = None

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            for side in self.sides:
                self._all_sent()
                self._turn(side)
                self._look(side)
                self._close_all(side)
            for side in self.sides:
                self._turn(side)
                self._look(side)
            hidden = [key for key in self.bucket.objects if key.startswith(HIDDEN.encode())]
            assert not hidden, f"hidden copies stay behind: {hidden}"
            for side in self.sides:
                assert len(resolve(side.mount.fs.uploads.retry([]))) == len(side.kept)
            assert not self.bucket.uploads, f"unfinished uploads stay behind: {list(self.bucket.uploads)}"
        finally:
            self.patches.undo()
            for side in self.sides:
                side.mount.crash()
            shutil.rmtree(self.directory)

    # -- making and removing names

    @rule(side=sides, parent=indices, name=names, mode=st.sampled_from([0o755, 0o700]))
    def mkdir(self, side: int, parent: int, name: bytes, mode: int) -> None:
        self._make(side, parent, name, lambda fs, path: fs.mkdir(path, mode), Object(b"", DIRECTORY | mode))

    @rule(side=sides, parent=indices, name=names, leads_to=st.sampled_from([b"a", b"../nowhere", b"\xff" * 300]))
    def symlink(self, side: int, parent: int, name: bytes, leads_to: bytes) -> None:
        self._make(side, parent, name, lambda fs, path: fs.symlink(leads_to, path), Object(leads_to, LINK | 0o777))

    @rule(side=sides, parent=indices, name=names)
    def mkfifo(self, side: int, parent: int, name: bytes) -> None:
        mode = stat.S_IFIFO | 0o600
        self._make(side, parent, name, lambda fs, path: fs.mknod(path, mode), Object(b"", mode))

    @rule(side=sides, path=indices, name=st.none() | names)
    def unlink(self, side: int, path: int, name: bytes | None) -> None:
        here, shown = self._turn_of(side)
        at = self._existing(shown, path, name)
        if not at:
            return
        refused = self.world.refusal(shown, at)
        entry = shown.get(at)
        allowed = {refused} if refused else {errno.ENOENT} if entry is None else set()
        if entry is not None and entry.kind == DIRECTORY:
            allowed = {errno.EISDIR}
        torn = entry is not None and entry.inode is not None and not entry.inode.stands(self.world.objects)
        if self._expect(lambda: here.mount.local.unlink(at), allowed, {errno.ESTALE} if torn else set()):
            assert entry is not None
            self.world.keep_directory(shown, at.rpartition(b"/")[0])
            self.world.detach(here, entry.key)
            self.world.objects.pop(entry.key, None)
            self._changed(here)

    @rule(side=sides, path=indices)
    def rmdir(self, side: int, path: int) -> None:
        here, shown = self._turn_of(side)
        at = self._existing(shown, path, None)
        entry = shown.get(at)
        allowed: set[int] = set()
        if entry is None or not at:
            return
        if entry.kind != DIRECTORY:
            allowed = {errno.ENOTDIR}
        elif children(shown, at) or self.world.holds_bytes(entry.key):
            allowed = {errno.ENOTEMPTY}
        if self._expect(lambda: here.mount.local.rmdir(at), allowed):
            self.world.keep_directory(shown, at.rpartition(b"/")[0])
            self.world.objects.pop(entry.key, None)
            for inode in here.inodes.values():
                inode.dead = inode.dead or (inode.path is not None and inode.key.startswith(entry.key))
            self._changed(here)

    @rule(side=sides, old=indices, parent=indices, name=st.none() | names, surprises=st.tuples(surprises, surprises))
    def rename(
        self, side: int, old: int, parent: int, name: bytes | None, surprises: tuple[bytes | None, bytes | None]
    ) -> None:
        here, shown = self._turn_of(side)
        source = self._existing(shown, old, None)
        target = self._existing(shown, parent, None) if name is None else self._below(shown, parent, name)
        if shown[source].kind != DIRECTORY:
            for path, body in zip((source, target), surprises, strict=True):
                shown = self._surprise(here, path, body)
        entry = shown.get(source)
        if entry is None or not source or not target:
            return
        allowed = self.world.refuses_rename(shown, source, target)
        may: set[int] = set()
        for path in (source, target):
            inode = shown[path].inode if path in shown else None
            if inode is not None and not inode.stands(self.world.objects):
                may = {errno.ESTALE}
        if not self._expect(lambda: here.mount.local.rename(source, target), allowed, may) or source == target:
            return
        if entry.kind == DIRECTORY:
            self.world.move_directory(here, shown, source, target)
        else:
            self.world.move_file(here, shown, source, target)
        self._changed(here)

    # -- files

    @rule(
        side=sides,
        parent=indices,
        name=st.none() | names,
        flags=st.sampled_from([0, os.O_TRUNC, os.O_EXCL]),
        body=bodies,
        close=st.booleans(),
        surprise=surprises,
    )
    def create(
        self, side: int, parent: int, name: bytes | None, flags: int, body: bytes, close: bool, surprise: bytes | None
    ) -> None:
        here, shown = self._turn_of(side)
        path = self._existing(shown, parent, None) if name is None else self._below(shown, parent, name)
        if not (self.behind and path not in shown):  # with write-back only the upload finds out (S-48)
            shown = self._surprise(here, path, surprise)
        if self.behind:
            flags &= ~os.O_EXCL  # with write-back the store is asked only at the upload (S-48)
        handle = self._open(here, shown, path, os.O_RDWR | os.O_CREAT | flags)
        if handle is not None:
            self._write(here, handle, 0, body)
            if close:
                self._close(here, handle)

    @rule(
        side=sides,
        path=indices,
        flags=st.sampled_from([os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC]),
        surprise=surprises,
    )
    def open(self, side: int, path: int, flags: int, surprise: bytes | None) -> None:
        here, shown = self._turn_of(side)
        at = self._existing(shown, path, None)
        if flags != os.O_RDONLY:
            shown = self._surprise(here, at, surprise)
        self._open(here, shown, at, flags)

    @rule(side=sides, handle=indices, offset=st.sampled_from(OFFSETS) | st.none(), body=bodies)
    def write(self, side: int, handle: int, offset: int | None, body: bytes) -> None:
        """offset None: write at the end."""
        here = self._turn_of(side)[0]
        open_file = self._pick(here, handle)
        if open_file is not None and open_file.writable and not open_file.inode.dead:
            self._write(here, open_file, offset, body)

    @rule(side=sides, handle=indices, size=st.sampled_from(SIZES))
    def ftruncate(self, side: int, handle: int, size: int) -> None:
        here = self._turn_of(side)[0]
        open_file = self._pick(here, handle)
        if open_file is None or not open_file.writable or open_file.inode.dead:
            return
        inode = open_file.inode
        if self._expect(lambda: open_file.file.truncate(size), set(), self._may_be_stale(inode)):
            inode.anew = inode.anew or not size
            self._wrote(open_file, lambda body: resized(body, size))

    @rule(side=sides, path=indices, size=st.sampled_from(SIZES), surprise=surprises)
    def truncate(self, side: int, path: int, size: int, surprise: bytes | None) -> None:
        here, shown = self._turn_of(side)
        at = self._existing(shown, path, None)
        entry = self._surprise(here, at, surprise).get(at)
        if entry is None or entry.kind != REGULAR:
            return
        inode = here.inodes.get(here.mount.local.stat(at).ino)
        if inode is not None:
            self._check_same(inode, entry)
            if size and not self._stands(inode):
                return
        may = self._may_be_stale(inode) if inode is not None else set()
        if not self._expect(lambda: here.mount.local.truncate(at, size), set(), may):
            return
        inode = inode or Inode(entry.key, at, self.world.objects[entry.key])
        inode.anew = inode.anew or not size
        self.world.change_unsent(inode, resized(inode.body, size))
        writers = [handle for handle in here.handles_of(inode) if handle.writable]
        if writers and not writers[0].known:
            # The change is sent when a writer closes, but a restarted server may not know the writers: send it now.
            self._expect(writers[0].file.fsync, set())
        if not writers or not writers[0].known:
            self.world.send(inode)
            self._changed(here)
            self.world.tidy(here)

    @rule(side=sides, handle=indices)
    def fsync(self, side: int, handle: int) -> None:
        here = self._turn_of(side)[0]
        open_file = self._pick(here, handle)
        if open_file is None or open_file.inode.dead:
            return
        if open_file.inode.unsent is not None and not self._stands(open_file.inode):
            self._mend(here, open_file)
        elif self._expect(open_file.file.fsync, set(), self._may_be_stale(open_file.inode)):
            self.world.send(open_file.inode)
            self._changed(here)
        else:
            self._mend(here, open_file)

    @rule(side=sides, handle=indices)
    def read(self, side: int, handle: int) -> None:
        here = self._turn_of(side)[0]
        open_file = self._pick(here, handle)
        if open_file is not None and not open_file.inode.dead:
            self._read(open_file)

    @rule(side=sides, handle=indices)
    def close(self, side: int, handle: int) -> None:
        here = self._turn_of(side)[0]
        open_file = self._pick(here, handle)
        if open_file is not None:
            self._close(here, open_file)

    # -- attributes

    @rule(side=sides, path=indices, mode=st.sampled_from([0o600, 0o755, 0o444]), surprise=surprises)
    def chmod(self, side: int, path: int, mode: int, surprise: bytes | None) -> None:
        here, shown = self._turn_of(side)
        self._set(here, shown, path, lambda at: here.mount.local.chmod(at, mode), surprise, mode=mode)

    @rule(side=sides, path=indices, seconds=st.integers(1, 1000), surprise=surprises)
    def utimens(self, side: int, path: int, seconds: int, surprise: bytes | None) -> None:
        here, shown = self._turn_of(side)
        when = EPOCH_NS - seconds * 10**9 + 123
        change = SetAttr(mtime_ns=when, atime_ns=when)
        self._set(here, shown, path, lambda at: here.mount.local.setattr(at, change), surprise, mtime_ns=when)

    @rule(
        side=sides,
        path=indices,
        name=st.sampled_from([b"user.a", b"user.\xff"]),
        content=st.binary(max_size=4),
        surprise=surprises,
    )
    def setxattr(self, side: int, path: int, name: bytes, content: bytes, surprise: bytes | None) -> None:
        here, shown = self._turn_of(side)
        call = lambda at: here.mount.local.setxattr(at, name, content)  # noqa: E731
        self._set(here, shown, path, call, surprise, xattr=(name, content))

    # -- lives of the mounts

    @rule(side=sides)
    def remount(self, side: int) -> None:
        """Close everything, unmount in order and mount again."""
        here = self._turn_of(side)[0]
        self._close_all(here)
        here.mount.stop()
        here.mount.build()

    @rule(side=sides)
    def crash(self, side: int) -> None:
        """Let all processes die; the next mount sends what was unsent (S-20)."""
        here = self._turn_of(side)[0]
        for handle in list(here.handles):
            self._mend(here, handle)
        here.mount.crash()
        here.mount.build()
        here.handles.clear()
        for inode in here.inodes.values():
            if not inode.dead:
                self.world.send(inode)
        here.inodes.clear()
        self._changed(here)

    @rule(side=sides)
    def restart(self, side: int) -> None:
        """Let the server die and another take over the mount: open files go on by their inode number (S-41)."""
        here = self._turn_of(side)[0]
        for handle in list(here.handles):
            self._mend(here, handle)
        here.mount.crash()
        here.mount.build(resumed=True)
        for inode in here.inodes.values():
            # A file without a name, or whose version another client replaced or removed, is lost with the server.
            taken = inode.unsent is None and not inode.stands(self.world.objects)
            inode.dead = inode.dead or inode.path is None or taken
            inode.restarted = inode.pinned = True
            inode.anew = inode.anew and inode.unsent is not None
        here.mount.take_over([handle.file for handle in here.handles])
        for handle in here.handles:
            handle.known = False
            # The new server does not know how many handles a file has, so that any close may send it: send all now.
            if not handle.inode.dead and handle.inode.unsent is not None:
                self._expect(handle.file.fsync, set())
                self.world.send(handle.inode)
                self._changed(here)

        if self.behind:
            resolve(here.mount.fs.flush_all())
            self._send_behind(here)

    @rule(side=sides)
    def sync(self, side: int) -> None:
        """S-48 After sync every closed file is in the store."""
        self._send_behind(self._turn_of(side)[0])

    @rule(side=sides, index=indices)
    def discard(self, side: int, index: int) -> None:
        """Let a user discard a file that lost a conflict."""
        here = self._turn_of(side)[0]
        if here.kept:
            key = here.kept[index % len(here.kept)][0]
            left = [one for one in here.kept if one[0] != key]
            assert resolve(here.mount.fs.uploads.forget(key)) == len(here.kept) - len(left)
            here.kept = left

    @rule(side=sides)
    def forget(self, side: int) -> None:
        here = self.sides[side]
        here.mount.forget({handle.file.ino for handle in here.handles})

    @rule(seconds=st.sampled_from([0.4, 1.1, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- another client

    @rule(key=keys, marker=st.booleans(), body=bodies)
    def foreign_put(self, key: str, marker: bool, body: bytes) -> None:
        key, body = (key + "/", b"") if marker else (key, body)
        if key:
            self._all_sent()
            self._foreign(key, body)

    @rule(index=indices)
    def foreign_append(self, index: int) -> None:
        self._all_sent()
        found = sorted(key for key in self.world.objects if not key.endswith("/"))
        if found:
            key = found[index % len(found)]
            self._foreign(key, self.world.objects[key].body + b"more")

    @rule(index=indices)
    def foreign_delete(self, index: int) -> None:
        self._all_sent()
        found = sorted(self.world.objects)
        if found:
            self._foreign(found[index % len(found)], None)

    # -- what must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check_bucket()
        for side in self.sides:
            self._check_kept(side)
            check(side.mount.fs, restarted=side.mount.restarted)
        if self.eager and self.acted is not None:
            self._turn(self.acted)
            self._look(self.acted)
            check(self.acted.mount.fs, restarted=self.acted.mount.restarted)

    @rule(side=sides)
    def look(self, side: int) -> None:
        self._look(self._turn_of(side)[0])
