"""The building blocks of the state machine's rules: taking a turn, checking everything, opening, writing, closing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine

from datastore.fuse.loop import all_of, now
from datastore.fuse.store.base import WriteOptions
from tests.clock import ManualClock
from tests.driving import resolve
from tests.localfs import LocalFs
from tests.memorystore import MemoryBucket, MemoryStore
from tests.model.reference import Inode, Object, Shown, children
from tests.model.world import DIRECTORY, LINK, LINK_SUFFIX, REGULAR, Handle, Side, World, named, outcome, patched


class Steps(RuleBasedStateMachine):
    """State and parts of the rules; FilesystemMachine has the rules themselves."""

    directory: Path
    clock: ManualClock
    bucket: MemoryBucket
    ttl_s: float
    eager: bool
    sides: list[Side]
    world: World
    acted: Side | None
    refuses: bool
    """The mounts have `conflict: fail`."""
    behind: bool
    """The mounts have `writeBack`."""
    gives_up: bool
    """After ESTALE because of another client's version a writer closes the file; else it writes the file anew."""
    whole: bool
    """Files are uploaded in one piece, when they are closed."""

    def _look(self, side: Side) -> None:
        """Check that every directory lists, and every name shows, what the model says."""
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
            opened = side.inodes.get(local.stat(path).ino)
            if opened is not None and opened.unsent is None and not opened.dead:
                self._check_same(opened, entry)
                opened.pinned = True

    # -- parts of the rules

    def _turn(self, side: Side) -> None:
        """Let a mount act: advance the clock until it must see all changes of other clients (time to live, S-28)."""
        self.clock.advance(0.002)
        due = side.foreign_at + self.ttl_s
        if self.clock.monotonic() < due:
            self.clock.advance(due - self.clock.monotonic() + 1e-6)
        self.acted = side

    def _turn_of(self, index: int) -> tuple[Side, dict[bytes, Shown]]:
        side = self.sides[index]
        for other in self.sides:
            if other is not side:
                self._send_behind(other)
        self._turn(side)
        shown = self.world.tree(side)
        for inode in side.inodes.values():
            if inode.unsent is not None or inode.path is None:
                continue
            there = shown.get(inode.path)
            renamed = (there is None and inode.key in self.world.objects) or (there and there.key != inode.key)
            inode.dead |= bool(renamed) or (inode.restarted and not inode.stands(self.world.objects))
        return side, shown

    def _changed(self, by: Side | None) -> None:
        self.clock.advance(0.001)
        for side in self.sides:
            if side is not by or self._beside_directory(side):
                side.foreign_at = self.clock.monotonic()

    def _beside_directory(self, side: Side) -> bool:
        """Whether a directory with the name of an open file was made: it is shown (S-37) at the next listing."""
        files = tuple(f"{inode.key}/" for inode in side.inodes.values() if inode.path is not None)
        return any(key.startswith(files) for key in self.world.objects)

    def _surprise(self, side: Side, path: bytes, body: bytes | None) -> dict[bytes, Shown]:
        """S-161 Let another client replace what this mount has just looked up; return what the mount must show now.
        body None: nothing is replaced. Files that are open here are left to the other rules."""
        shown = self.world.tree(side)
        if (
            body is None
            or not path
            or self.world.refusal(shown, path)
            or (path not in shown and self.world.refuses_new(shown, path))
        ):
            return shown
        self._all_sent()
        shown = self.world.tree(side)
        entry = shown.get(path)
        key = entry.key if entry is not None else self.world.new_key(shown, path)
        opened = any(inode.key == key for inode in side.inodes.values() if inode.path is not None)
        if opened or (entry is not None and entry.kind != REGULAR):
            return shown
        # Within its time to live the mount trusts what it made itself, and only its upload would find out (S-162).
        self.clock.advance(self.ttl_s + 0.001)
        side.mount.local.listdir(path.rpartition(b"/")[0])
        assert side.mount.local.exists(path) == (entry is not None)
        self._foreign(key, body)
        return self.world.tree(side)

    def _foreign(self, key: str, body: bytes | None) -> None:
        """Let another client write an object, or delete it (body None)."""
        store = MemoryStore(self.bucket)
        if body is None:
            now(store.delete(key))
            del self.world.objects[key]
        else:
            now(store.put(key, body, WriteOptions()))
            self.world.objects[key] = Object(body)
        self._changed(None)

    def _make(
        self, side: int, parent: int, name: bytes, call: Callable[[LocalFs, bytes], object], made: Object
    ) -> None:
        """Create a directory, a link or a special file."""
        here, shown = self._turn_of(side)
        path = self._below(shown, parent, name)
        if self._expect(lambda: call(here.mount.local, path), self.world.refuses_new(shown, path)):
            kind = stat.S_IFMT(made.mode or 0)
            key = self.world.new_key(shown, path, directory=kind == DIRECTORY)
            self.world.objects[key + (LINK_SUFFIX if kind == LINK else "")] = made
            self._changed(here)

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
        """Make a call; return whether it succeeded. It must fail with one of `allowed`, if any, and may with `may`."""
        number = outcome(call)
        assert number in (allowed or {0} | may), f"{named(number)}, expected {named(allowed or {0} | may)}"
        return number == 0

    def _may_be_stale(self, inode: Inode) -> set[int]:
        """Return {ESTALE} if another client replaced the file's version, or another file here has its name."""
        if inode.path is None:
            return set()
        here = next(side for side in self.sides if inode in side.inodes.values())
        rival = any(other is not inode and other.key == inode.key and other.unsent for other in here.inodes.values())
        return {errno.ESTALE} if rival or not self._stands(inode) else set()

    def _stands(self, inode: Inode) -> bool:
        """Whether an upload would replace the version that the file is based on, and no later one of another client."""
        present = self.world.objects.get(inode.key)
        if inode.anew and not self.refuses:
            return True
        if inode.seen is None or present is None or present is inode.seen:
            return present is inode.seen
        return self.whole and present.body == inode.seen.body  # uploaded in parts, equal bytes may have two etags

    def _gave_way(self, inode: Inode) -> bool:
        """S-162 Whether a new file without content left its name to another client that closed its file first."""
        present = self.world.objects.get(inode.key)
        if self.refuses or inode.anew or inode.seen is not None or inode.body or present is None:
            return False
        inode.seen, inode.unsent = present, None
        return True

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
        inode.pinned = inode.pinned or handle.writable
        inode.anew = inode.anew or bool(flags & os.O_TRUNC)
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
        """Check that a name that leads to an open file shows that file, or what it grew to (S-31)."""
        assert inode.path is not None, "the name leads to a file that was removed"
        if inode.dead:
            inode.dead, inode.key, inode.seen = False, entry.key, self.world.objects[entry.key]
            return
        assert inode.key == entry.key
        if inode.unsent is None and not inode.stands(self.world.objects):
            assert _may_follow(inode, entry.body, pinned=inode.pinned), "an open file became another version"
            inode.seen = self.world.objects[inode.key]

    def _write(self, side: Side, handle: Handle, offset: int | None, body: bytes) -> None:
        inode = handle.inode
        size = handle.file.stat().size  # also lets the mount see what another client did to the name
        at = size if offset is None else offset
        if self._expect(lambda: handle.file.write(body, at), set(), self._may_be_stale(inode)) and body:
            self._wrote(handle, lambda old: patched(old, at, body))

    def _wrote(self, handle: Handle, change: Callable[[bytes], bytes]) -> None:
        """Note a change of content. If another client replaced the version, the file tells which one it is based on."""
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
        side = next(side for side in self.sides if handle in side.handles)
        self.world.change_unsent(inode, change(inode.body))
        if inode.restarted and inode.stands(self.world.objects):
            # The new server does not know the file's other handles, so that any close may send it: send it now.
            self._expect(handle.file.fsync, set())
            self.world.send(inode)
            self._changed(side)

    def _read(self, handle: Handle) -> None:
        inode = handle.inode
        read: list[bytes] = []
        number = outcome(lambda: read.append(handle.file.read()))
        if number:
            assert number in self._may_be_stale(inode), f"read: {named(number)}"
            return
        pinned, inode.pinned = inode.pinned, True
        if read[0] == inode.body:
            return
        present = self.world.objects.get(inode.key)
        followed = inode.path is not None and inode.unsent is None and present is not None and present.body == read[0]
        assert followed, f"read {read[0][:20]!r} ({len(read[0])}), expected {inode.body[:20]!r} ({len(inode.body)})"
        assert _may_follow(inode, read[0], pinned=pinned), "an open file became another version"
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
        if handle not in side.handles:
            return
        self._expect(handle.file.close, set())
        side.handles.remove(handle)
        if (handle.writable or last) and not self._waits(side, inode, closed=handle):
            self.world.send(inode)
            self._changed(side)
        self.world.tidy(side)

    def _waits(self, side: Side, inode: Inode, closed: Handle) -> bool:
        """S-48 Whether close left the upload to the background; one that began while the file was open may end now."""
        if not self.behind or inode.unsent is None or inode.path is None:
            return False
        waits = any(row["path"] == os.fsdecode(inode.path) for row in side.mount.fs.uploads.unsent())
        assert waits or not self.whole or not closed.writable, f"close waited for the upload of {inode.path!r}"
        return waits

    def _send_behind(self, side: Side) -> None:
        """S-48 Send the closed files that wait; a file that is open for writing waits for its close."""
        if not self.behind:
            return
        fs = side.mount.fs
        resolve(all_of(fs.loop.call(lambda: fs.upkeep.send_due(float("inf")))))
        for inode in list(side.inodes.values()):
            written = any(handle.writable for handle in side.handles_of(inode))
            if inode.unsent is not None and inode.path is not None and not inode.dead and not written:
                self.world.send(inode)
                self._changed(side)
        self.world.tidy(side)

    def _all_sent(self) -> None:
        for side in self.sides:
            self._send_behind(side)

    def _mend(self, side: Side, handle: Handle) -> None:
        """A file whose unchanged bytes are gone (S-33) fails with ESTALE and stays listed; then write it anew."""
        inode = handle.inode
        if inode.dead or inode.path is None or inode.unsent is None or self._stands(inode):
            return
        if self.refuses or self.gives_up:
            self._lose(side, handle)
            return
        number = outcome(handle.file.fsync)
        if number:
            assert number == errno.ESTALE, named(number)
            assert any(row["error"] for row in side.mount.fs.uploads.unsent()), "not sent and not listed"
            handle.file.truncate(0)
            inode.anew = True
            self.world.change_unsent(inode, b"")
            self._expect(handle.file.fsync, set())
        elif self._gave_way(inode):
            return
        else:
            self._check_sent(inode)
        self.world.send(inode)
        self._changed(side)

    def _check_sent(self, inode: Inode) -> None:
        """Check that an upload over another client's change was right: that removed the file, or wrote the same."""
        present = self.world.objects.get(inode.key)
        assert present is not None or not self.refuses, "what another client removed was replaced"
        same = present is None or inode.body == present.body or (inode.seen and inode.seen.body == present.body)
        assert same, "another client's version was replaced"

    def _lose(self, side: Side, handle: Handle) -> None:
        """S-47 The second writer gets ESTALE, its bytes are kept; after its close the name shows the first writer's."""
        inode = handle.inode
        number = outcome(handle.file.fsync)
        if number == 0:
            if not self._gave_way(inode):
                self._check_sent(inode)
                self.world.send(inode)
                self._changed(side)
            return
        assert number == errno.ESTALE, named(number)
        for one in side.handles_of(inode):
            self._expect(one.file.close, {errno.ESTALE} if one.writable else set())
            side.handles.remove(one)
        side.kept.append((inode.key, inode.body))
        inode.dead = True
        self.world.tidy(side)

    def _check_kept(self, side: Side) -> None:
        """Check that what lost a conflict is on the disk, and listed, until it is discarded."""
        rows = [row for row in side.mount.fs.uploads.unsent() if row["stuck"]]
        kept = [(row["path"], (side.mount.fs.core.staging_dir / str(row["staging"])).read_bytes()) for row in rows]
        assert sorted(key for key, _ in side.kept) == sorted(str(path) for path, _ in kept), f"{kept}"
        for path, body in kept:
            # A file that was changed in part has holes where it was not written, as the version below is gone.
            like = [expected for key, expected in side.kept if key == path and _written_of(body, expected)]
            assert like, f"{path} is kept as {body[:20]!r} ({len(body)})"

    def _close_all(self, side: Side) -> None:
        for handle in list(side.handles):
            if handle in side.handles:
                self._close(side, handle)
        self._send_behind(side)
        unsent = [row for row in side.mount.fs.uploads.unsent() if not row["stuck"]]
        assert not unsent, f"all is closed, but {unsent}"

    def _set(
        self,
        side: Side,
        shown: dict[bytes, Shown],
        index: int,
        call: Callable[[bytes], object],
        surprise: bytes | None,
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        xattr: tuple[bytes, bytes] | None = None,
    ) -> None:
        at = self._existing(shown, index, None)
        entry = self._surprise(side, at, surprise)[at]
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


def _written_of(body: bytes, expected: bytes) -> bool:
    return len(body) == len(expected) and all(one in (0, other) for one, other in zip(body, expected, strict=True))


def _same(found: bytes, expected: bytes, where: str) -> None:
    assert found == expected, f"{where}: {found[:20]!r} ({len(found)}), expected {expected[:20]!r} ({len(expected)})"


def _same_entries(found: dict[bytes, int], expected: dict[bytes, int], where: str, *, exact: bool) -> None:
    """exact False: a plain listing shows as a file what only metadata tells (a FIFO, a link as s3fs writes it)."""
    if not exact:
        found = {
            name: expected[name] if kind == REGULAR and expected.get(name) in (LINK, stat.S_IFIFO) else kind
            for name, kind in found.items()
        }
    assert found == expected, f"{where} lists {found}, expected {expected}"


def _may_follow(inode: Inode, body: bytes, *, pinned: bool) -> bool:
    """Whether an open file may become `body`: it grew (S-31), or it has the same size and was never read (S-147)."""
    return body.startswith(inode.body) or (not pinned and len(body) == len(inode.body))
