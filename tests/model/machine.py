"""The state machine: two mounts and another client on one bucket; after each step the world is what the model says."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from datastore.fuse.ops import SetAttr
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.store.memory import MemoryBucket, MemoryStore
from tests.model.invariants import check
from tests.model.mounts import START_NS, ManualClock, Mount
from tests.model.reference import HIDDEN, Inode, Object, Shown, children
from tests.model.world import DIRECTORY, LINK, REGULAR, Handle, Side, World, named, outcome, patched, resized

NAMES = [b"a", b"b", b"d", b"x", b"x.rclonelink", b"\xff", "\u00e9".encode(), "\uf0ff".encode(), "\uf02f".encode()]
SEGMENTS = ["a", "b", "d", "x", "x.rclonelink", "a.rclonelink", "\uf0ff", "\uf0c3\uf0a9", "", ".", ".."]
SIZES = [0, 1, 5, 4095, 4096, 5000, 9000]
OFFSETS = [0, 1, 5, 4096, 5000, 8192]

sides = st.integers(0, 1)
indices = st.integers(0, 40)
names = st.sampled_from(NAMES)
bodies = st.builds(lambda byte, size: bytes([byte]) * size, st.integers(97, 102), st.sampled_from(SIZES))
keys = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3).map("/".join)


class FilesystemMachine(RuleBasedStateMachine):
    """Paths are chosen by index into what exists, modulo its number, so that shrinking keeps them meaningful."""

    @initialize(
        ttl_s=st.sampled_from([0.0, 1.0]),
        page_keys=st.sampled_from([1000, 1000, 3]),
        silly_copy_bytes=st.sampled_from([1 << 20, 16]),
        eager=st.booleans(),
    )
    def mount(self, ttl_s: float, page_keys: int, silly_copy_bytes: int, eager: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ds-model-"))
        self.clock = ManualClock()
        self.bucket = MemoryBucket(clock=self.clock.time_ns)
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
            )
            self.sides.append(Side(mount))
        self.world = World(self.sides)
        self.acted: Side | None = None

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            for side in self.sides:
                self._turn(side)
                self._look(side)
                self._close_all(side)
            for side in self.sides:
                self._turn(side)
                self._look(side)
            hidden = [key for key in self.bucket.objects if key.startswith(HIDDEN.encode())]
            assert not hidden, f"hidden copies stay behind: {hidden}"
        finally:
            for side in self.sides:
                side.mount.crash()
            shutil.rmtree(self.directory)

    # -- making and removing names

    @rule(side=sides, parent=indices, name=names, mode=st.sampled_from([0o755, 0o700]))
    def mkdir(self, side: int, parent: int, name: bytes, mode: int) -> None:
        here, shown = self._turn_of(side)
        path = self._below(shown, parent, name)
        if self._expect(lambda: here.mount.local.mkdir(path, mode), self.world.refuses_new(shown, path)):
            self.world.objects[self.world.new_key(shown, path, directory=True)] = Object(b"", DIRECTORY | mode)
            self._changed(here)

    @rule(side=sides, parent=indices, name=names, leads_to=st.sampled_from([b"a", b"../nowhere", b"\xff" * 300]))
    def symlink(self, side: int, parent: int, name: bytes, leads_to: bytes) -> None:
        here, shown = self._turn_of(side)
        path = self._below(shown, parent, name)
        if self._expect(lambda: here.mount.local.symlink(leads_to, path), self.world.refuses_new(shown, path)):
            self.world.objects[self.world.new_key(shown, path) + ".rclonelink"] = Object(leads_to, LINK | 0o777)
            self._changed(here)

    @rule(side=sides, parent=indices, name=names)
    def mkfifo(self, side: int, parent: int, name: bytes) -> None:
        here, shown = self._turn_of(side)
        path = self._below(shown, parent, name)
        if self._expect(
            lambda: here.mount.local.mknod(path, stat.S_IFIFO | 0o600), self.world.refuses_new(shown, path)
        ):
            self.world.objects[self.world.new_key(shown, path)] = Object(b"", stat.S_IFIFO | 0o600)
            self._changed(here)

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
        elif children(shown, at):
            allowed = {errno.ENOTEMPTY}
        if self._expect(lambda: here.mount.local.rmdir(at), allowed):
            self.world.keep_directory(shown, at.rpartition(b"/")[0])
            self.world.objects.pop(entry.key, None)
            for inode in here.inodes.values():
                inode.dead = inode.dead or (inode.path is not None and inode.key.startswith(entry.key))
            self._changed(here)

    @rule(side=sides, old=indices, parent=indices, name=st.none() | names)
    def rename(self, side: int, old: int, parent: int, name: bytes | None) -> None:
        here, shown = self._turn_of(side)
        source = self._existing(shown, old, None)
        target = self._existing(shown, parent, None) if name is None else self._below(shown, parent, name)
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
    )
    def create(self, side: int, parent: int, name: bytes | None, flags: int, body: bytes, close: bool) -> None:
        here, shown = self._turn_of(side)
        path = self._existing(shown, parent, None) if name is None else self._below(shown, parent, name)
        handle = self._open(here, shown, path, os.O_RDWR | os.O_CREAT | flags)
        if handle is not None:
            self._write(here, handle, 0, body)
            if close:
                self._close(here, handle)

    @rule(side=sides, path=indices, flags=st.sampled_from([os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC]))
    def open(self, side: int, path: int, flags: int) -> None:
        here, shown = self._turn_of(side)
        self._open(here, shown, self._existing(shown, path, None), flags)

    @rule(side=sides, handle=indices, offset=st.sampled_from(OFFSETS) | st.none(), body=bodies)
    def write(self, side: int, handle: int, offset: int | None, body: bytes) -> None:
        """offset None: at the end."""
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
            self._wrote(open_file, lambda body: resized(body, size))

    @rule(side=sides, path=indices, size=st.sampled_from(SIZES))
    def truncate(self, side: int, path: int, size: int) -> None:
        here, shown = self._turn_of(side)
        at = self._existing(shown, path, None)
        entry = shown.get(at)
        if entry is None or entry.kind != REGULAR:
            return
        inode = here.inode_at(entry.key, self.world.objects)
        may = self._may_be_stale(inode) if inode is not None else set()
        if not self._expect(lambda: here.mount.local.truncate(at, size), set(), may):
            return
        inode = inode or Inode(entry.key, at, self.world.objects[entry.key])
        self.world.change_unsent(inode, resized(inode.body, size))
        if not any(handle.writable for handle in here.handles_of(inode)):
            self.world.send(inode)
            self._changed(here)

    @rule(side=sides, handle=indices)
    def fsync(self, side: int, handle: int) -> None:
        here = self._turn_of(side)[0]
        open_file = self._pick(here, handle)
        if open_file is None or open_file.inode.dead:
            return
        if self._expect(open_file.file.fsync, set(), self._may_be_stale(open_file.inode)):
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

    @rule(side=sides, path=indices, mode=st.sampled_from([0o600, 0o755, 0o444]))
    def chmod(self, side: int, path: int, mode: int) -> None:
        here, shown = self._turn_of(side)
        self._set(here, shown, path, lambda at: here.mount.local.chmod(at, mode), mode=mode)

    @rule(side=sides, path=indices, seconds=st.integers(1, 1000))
    def utimens(self, side: int, path: int, seconds: int) -> None:
        here, shown = self._turn_of(side)
        when = START_NS - seconds * 10**9 + 123
        change = SetAttr(mtime_ns=when, atime_ns=when)
        self._set(here, shown, path, lambda at: here.mount.local.setattr(at, change), mtime_ns=when)

    @rule(side=sides, path=indices, name=st.sampled_from([b"user.a", b"user.\xff"]), content=st.binary(max_size=4))
    def setxattr(self, side: int, path: int, name: bytes, content: bytes) -> None:
        here, shown = self._turn_of(side)
        self._set(here, shown, path, lambda at: here.mount.local.setxattr(at, name, content), xattr=(name, content))

    # -- lives of the mounts

    @rule(side=sides)
    def remount(self, side: int) -> None:
        """Everything is closed, the mount ends in order and begins again."""
        here = self._turn_of(side)[0]
        self._close_all(here)
        here.mount.stop()
        here.mount.build()

    @rule(side=sides)
    def crash(self, side: int) -> None:
        """All processes die; the next mount sends what was unsent (S-20)."""
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
        """The server dies and another takes over the mount: open files go on by their inode (S-41)."""
        here = self._turn_of(side)[0]
        for handle in list(here.handles):
            self._mend(here, handle)
        here.mount.crash()
        here.mount.build(resumed=True)
        for inode in here.inodes.values():
            # What another client took away, or nobody else has any more, died with the server.
            inode.dead = inode.dead or inode.path is None or not inode.stands(self.world.objects)
        here.mount.take_over([handle.file for handle in here.handles])

    @rule(side=sides)
    def forget(self, side: int) -> None:
        self.sides[side].mount.forget()

    @rule(seconds=st.sampled_from([0.4, 1.1, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- another client

    @rule(key=keys, marker=st.booleans(), body=bodies)
    def foreign_put(self, key: str, marker: bool, body: bytes) -> None:
        key, body = (key + "/", b"") if marker else (key, body)
        if not key:
            return
        MemoryStore(self.bucket).put(key, body, WriteOptions())
        self.world.objects[key] = Object(body)
        self._changed(None)

    @rule(index=indices)
    def foreign_append(self, index: int) -> None:
        found = sorted(key for key in self.world.objects if not key.endswith("/"))
        if found:
            key = found[index % len(found)]
            body = self.world.objects[key].body + b"more"
            MemoryStore(self.bucket).put(key, body, WriteOptions())
            self.world.objects[key] = Object(body)
            self._changed(None)

    @rule(index=indices)
    def foreign_delete(self, index: int) -> None:
        found = sorted(self.world.objects)
        if found:
            key = found[index % len(found)]
            MemoryStore(self.bucket).delete(key)
            del self.world.objects[key]
            self._changed(None)

    # -- what must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check_bucket()
        for side in self.sides:
            check(side.mount.fs)
        if self.eager and self.acted is not None:
            self._turn(self.acted)
            self._look(self.acted)
            check(self.acted.mount.fs)

    @rule(side=sides)
    def look(self, side: int) -> None:
        self._look(self._turn_of(side)[0])

    def _look(self, side: Side) -> None:
        """Every directory lists, and every name shows, what the model says."""
        shown = self.world.tree(side)
        local = side.mount.local
        for path, entry in sorted(shown.items()):
            attr = local.stat(path)
            where = f"{path!r} in mount {self.sides.index(side)}"
            assert stat.S_IFMT(attr.mode) == entry.kind, where
            if path:
                assert stat.S_IMODE(attr.mode) == entry.permissions, (
                    f"{where}: {attr.mode:o}, not {entry.permissions:o}"
                )
            if entry.kind == DIRECTORY:
                inside = {name: child.kind for name, child in children(shown, path).items()}
                _same_entries(dict(local.scandir(path)), inside, where, exact=False)
                _same_entries(dict(local.scandir(path, plus=True)), inside, where, exact=True)
                continue
            assert attr.size == len(entry.body), f"{where} has {attr.size} bytes, not {len(entry.body)}"
            self._look_into(side, path, entry, where)
        for path in shown:
            for name in (b"nothing", b"x.rclonelink.rclonelink"):
                if shown[path].kind == DIRECTORY:
                    assert not local.exists(path + b"/" + name)

    def _look_into(self, side: Side, path: bytes, entry: Shown, where: str) -> None:
        local = side.mount.local
        if entry.kind == LINK:
            assert local.readlink(path) == entry.body, where
        elif entry.kind == REGULAR:
            torn = entry.inode is not None and not entry.inode.stands(self.world.objects)
            number = outcome(lambda: _same(local.read(path), entry.body, where))
            assert number == 0 or (torn and number == errno.ESTALE), f"{where}: {named(number)}"

    # -- parts of the rules

    def _turn(self, side: Side) -> None:
        """Another client's changes of longer ago than the time to live are seen (S-28)."""
        self.clock.advance(0.002)
        due = side.foreign_at + self.ttl_s
        if self.clock.monotonic() < due:
            self.clock.advance(due - self.clock.monotonic() + 1e-6)
        self.acted = side

    def _turn_of(self, index: int) -> tuple[Side, dict[bytes, Shown]]:
        side = self.sides[index]
        self._turn(side)
        return side, self.world.tree(side)

    def _changed(self, by: Side | None) -> None:
        self.clock.advance(0.001)
        for side in self.sides:
            if side is not by:
                side.foreign_at = self.clock.monotonic()

    def _existing(self, shown: dict[bytes, Shown], index: int, name: bytes | None) -> bytes:
        paths = sorted(shown)
        path = paths[index % len(paths)]
        return path if name is None else path + b"/" + name if path else name

    def _below(self, shown: dict[bytes, Shown], index: int, name: bytes) -> bytes:
        paths = sorted(path for path, entry in shown.items() if entry.kind == DIRECTORY and path.count(b"/") < 2)
        path = paths[index % len(paths)]
        return path + b"/" + name if path else name

    def _pick(self, side: Side, index: int) -> Handle | None:
        return side.handles[index % len(side.handles)] if side.handles else None

    def _expect(self, call: Callable[[], object], allowed: set[int], may: set[int] = frozenset()) -> bool:  # type: ignore[assignment]
        """Whether the call succeeded; it must fail with one of `allowed` if there are any, and may fail with `may`."""
        number = outcome(call)
        assert number in (allowed or {0} | may), f"{named(number)}, expected {named(allowed or {0} | may)}"
        return number == 0

    def _may_be_stale(self, inode: Inode) -> set[int]:
        """ESTALE where another client took the file's version, or another file here took its name back."""
        if inode.path is None:
            return set()
        here = next(side for side in self.sides if inode in side.inodes.values())
        rival = any(other is not inode and other.key == inode.key and other.unsent for other in here.inodes.values())
        return {errno.ESTALE} if rival or not inode.stands(self.world.objects) else set()

    def _open(self, side: Side, shown: dict[bytes, Shown], path: bytes, flags: int) -> Handle | None:
        entry = shown.get(path)
        if not path or (entry is not None and entry.kind not in (REGULAR, DIRECTORY)):
            return None
        refused = self.world.refusal(shown, path)
        allowed = {refused} if refused else set()
        if entry is None and not refused:
            allowed = self.world.refuses_new(shown, path) if flags & os.O_CREAT else {errno.ENOENT}
        elif entry is not None:
            allowed = {errno.EEXIST} if flags & os.O_EXCL else {errno.EISDIR} if entry.kind == DIRECTORY else set()
        if entry is not None and entry.kind == DIRECTORY and flags & os.O_EXCL:
            allowed = {errno.EEXIST, errno.EISDIR}
        opened = []
        if not self._expect(lambda: opened.append(side.mount.local.open(path, flags)), allowed):
            return None
        file = opened[0]
        inode = side.inodes.get(file.ino)
        if entry is None:
            assert inode is None, "a new file has the inode of an open one"
            inode = self._new_inode(path, self.world.new_key(shown, path), flags)
        elif inode is None:
            inode = Inode(entry.key, path, self.world.objects[entry.key])
        else:
            self._check_same(inode, entry)
        side.inodes[file.ino] = inode
        handle = Handle(file, inode, flags & os.O_ACCMODE != os.O_RDONLY)
        side.handles.append(handle)
        if flags & os.O_TRUNC and entry is not None:
            self.world.change_unsent(inode, b"")
        if flags & os.O_EXCL:
            self._changed(side)
        return handle

    def _new_inode(self, path: bytes, key: str, flags: int) -> Inode:
        made = Object(b"", REGULAR | 0o644)
        if not flags & os.O_EXCL:
            return Inode(key, path, None, made)
        self.world.objects[key] = made
        return Inode(key, path, made)

    def _check_same(self, inode: Inode, entry: Shown) -> None:
        """The name led to a file that is open already: it is that file, or what it grew to (S-31)."""
        assert inode.path is not None, "the name leads to a file that was removed"
        assert inode.key == entry.key
        assert not inode.dead
        if inode.unsent is None and not inode.stands(self.world.objects):
            assert entry.body.startswith(inode.body), "an open file became another version"
            inode.seen = self.world.objects[inode.key]

    def _write(self, side: Side, handle: Handle, offset: int | None, body: bytes) -> None:
        inode = handle.inode
        at = handle.file.stat().size if offset is None else offset
        if self._expect(lambda: handle.file.write(body, at), set(), self._may_be_stale(inode)) and body:
            self._wrote(handle, lambda old: patched(old, at, body))

    def _wrote(self, handle: Handle, change: Callable[[bytes], bytes]) -> None:
        """The content is changed; of a version that another client took away the file itself says which it stands on."""
        inode = handle.inode
        if inode.path is None:
            inode.unsent = Object(change(inode.body))
            return
        present = self.world.objects.get(inode.key)
        if inode.unsent is None and not inode.stands(self.world.objects) and present is not None:
            read: list[bytes] = []
            number = outcome(lambda: read.append(handle.file.read()))
            assert number in (0, errno.ESTALE)
            grown = present.body.startswith(inode.body)
            if read and grown and read[0] == change(present.body) != change(inode.body):
                inode.seen = present
        self.world.change_unsent(inode, change(inode.body))

    def _read(self, handle: Handle) -> None:
        inode = handle.inode
        read: list[bytes] = []
        number = outcome(lambda: read.append(handle.file.read()))
        if number:
            assert number in self._may_be_stale(inode), f"read: {named(number)}"
            return
        if read[0] == inode.body:
            return
        present = self.world.objects.get(inode.key)
        followed = inode.path is not None and inode.unsent is None and present is not None and present.body == read[0]
        assert followed, f"read {read[0][:20]!r} ({len(read[0])}), expected {inode.body[:20]!r} ({len(inode.body)})"
        assert read[0].startswith(inode.body), "an open file became another version"
        inode.seen = present

    def _close(self, side: Side, handle: Handle) -> None:
        inode = handle.inode
        if inode.dead:
            outcome(handle.file.close)
            side.handles.remove(handle)
            self.world.tidy(side)
            return
        last = side.handles_of(inode) == [handle]
        if handle.writable or last:
            self._mend(side, handle)
        self._expect(handle.file.close, set())
        side.handles.remove(handle)
        if handle.writable or last:
            self.world.send(inode)
            self._changed(side)
        self.world.tidy(side)

    def _mend(self, side: Side, handle: Handle) -> None:
        """A file whose unchanged bytes are gone (S-33) says ESTALE and stays listed; whole new content is accepted."""
        inode = handle.inode
        if inode.dead or inode.path is None or inode.unsent is None or inode.stands(self.world.objects):
            return
        number = outcome(handle.file.fsync)
        if number:
            assert number == errno.ESTALE, named(number)
            assert any(row["error"] for row in side.mount.fs.uploads.unsent()), "not sent and not listed"
            handle.file.truncate(0)
            self.world.change_unsent(inode, b"")
            self._expect(handle.file.fsync, set())
        self.world.send(inode)
        self._changed(side)

    def _close_all(self, side: Side) -> None:
        for handle in list(side.handles):
            self._close(side, handle)
        unsent = side.mount.fs.uploads.unsent()
        assert not unsent, f"all is closed, but {unsent}"

    def _set(
        self,
        side: Side,
        shown: dict[bytes, Shown],
        index: int,
        call: Callable[[bytes], object],
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        xattr: tuple[bytes, bytes] | None = None,
    ) -> None:
        at = self._existing(shown, index, None)
        entry = shown[at]
        if not at or entry.kind not in (REGULAR, DIRECTORY):
            return
        self._expect(lambda: call(at), set())
        old = entry.object or Object(b"")
        kind = entry.kind
        new = old.but(mode=kind | (entry.permissions if mode is None else mode))
        if entry.kind == DIRECTORY:
            new = new.but(body=b"")
        if mtime_ns is not None and entry.kind != DIRECTORY:  # a directory's times move with its entries
            new = new.but(mtime_ns=mtime_ns)
        if xattr is not None:
            new = new.but(xattrs={**old.xattrs, xattr[0]: xattr[1]})
        if entry.inode is not None and entry.inode.unsent is not None:
            entry.inode.unsent = new
            return
        self.world.objects[entry.key] = new
        for inode in side.inodes.values():
            if inode.key == entry.key and inode.path is not None and inode.seen is old:
                inode.seen = new
        self._changed(side)


def _same(found: bytes, expected: bytes, where: str) -> None:
    assert found == expected, f"{where}: {found[:20]!r} ({len(found)}), expected {expected[:20]!r} ({len(expected)})"


def _same_entries(found: dict[bytes, int], expected: dict[bytes, int], where: str, *, exact: bool) -> None:
    """exact False: what only the metadata tells (a FIFO, a link as s3fs writes it) a plain listing shows as a file."""
    if not exact:
        found = {
            name: expected[name] if kind == REGULAR and expected.get(name) in (LINK, stat.S_IFIFO) else kind
            for name, kind in found.items()
        }
    assert found == expected, f"{where} lists {found}, expected {expected}"
