"""Changed files on their way to the store: staging, the journal of what is unsent, upload, and what is left after a
crash.

Promises S-18 to S-21: when close or fsync returned 0 the bytes are in the store; what could not be sent is kept on
disk, reported, and tried again.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from datastore.errors import DatastoreError, NotFound, PreconditionFailed, StoreError
from datastore.logs import fields

from ..data.multipart import Part, plan_upload
from ..data.staging import StagedFile
from ..data.version import ObjectVersion
from ..ops import FSError
from ..state.statedb import IntentId, Unsent
from ..store.base import ETag, PartNumber, UploadId, WriteOptions, WriteResult
from .attrs import from_metadata, to_metadata
from .core import Core
from .listing import NO_ETAG
from .nodes import Node
from .resolver import Resolver

log = logging.getLogger(__name__)
UNKNOWN = ETag("unknown")
"""The version of an object that may or may not exist; no server\'s etag."""


@dataclass(slots=True)
class Destination:
    """Where a staging file is to be written, and as what."""

    key: str
    options: WriteOptions


class Uploads:
    """Owns node.staged. Callers hold node.lock where it says so, and the tree lock around uploads."""

    def __init__(self, core: Core, resolver: Resolver) -> None:
        self._core = core
        self._resolver = resolver
        self._left: dict[str, tuple[StagedFile, Destination]] = {}
        """Unsent files of an earlier process, by staging name."""

    # -- staging; node.lock is held

    def stage(self, node: Node, *, empty: bool = False) -> StagedFile:
        """The node's staging file; made if need be. empty: nothing of the object's present content is kept.

        A file whose name another client took gets it back: the last close wins (S-32). FSError(ESTALE) when this mount
        has unsent bytes under that name already.
        """
        core = self._core
        if node.cut_off:
            self._take_back(node)
        if node.staged is None:
            base = ObjectVersion(node.key, node.etag, node.size) if node.etag and not empty else None
            staged = StagedFile(core.staging_dir / uuid.uuid4().hex, base, core.now_ns())
            with core.lock:
                node.staged = staged
        elif empty:
            node.staged.truncate(0)
        return node.staged

    def _take_back(self, node: Node) -> None:
        core = self._core
        with core.lock:
            if not core.nodes.reattach(node):
                raise FSError(errno.ESTALE, "another client took the name of this file, and it is in use here")
            if node.parent is not None:
                core.notifier.inval_entry(node.parent.ino, node.name)

    def record(self, node: Node) -> None:
        """Bring the journal's row of a node up to date."""
        staged = node.staged
        if staged is None or node.gone or not staged.dirty:
            return
        staged.journaled = True
        base = staged.base or ObjectVersion("", NO_ETAG, 0)
        self._core.db.record_unsent(
            Unsent(
                staged.path.name,
                node.key,
                base.key,
                base.etag,
                base.size,
                staged.base_size,
                to_metadata(node.attributes),
                node.attributes.content_type,
                staged.since_ns,
                staged.error,
            )
        )

    def fill(self, staged: StagedFile, gaps: list[tuple[int, int]]) -> None:
        """Fetch ranges of the base into the staging file. FSError(ESTALE) when another client replaced the base."""
        for start, stop in gaps:
            try:
                self._fetch(staged, start, stop)
            except (PreconditionFailed, NotFound) as error:
                if not self._recognised(staged):
                    raise FSError(errno.ESTALE, "another client replaced the object that was being changed") from error
                self._fetch(staged, start, stop)

    def _fetch(self, staged: StagedFile, start: int, stop: int) -> None:
        assert staged.base is not None
        staged.fill(start, self._core.reader.fetch(staged.base, start, stop - start))

    def discard(self, node: Node) -> None:
        """Drop the staging file: its content is in the store, or nobody wants it."""
        core = self._core
        with core.lock:
            staged, node.staged = node.staged, None
            if node.parent is not None:
                node.parent.pending.discard(node.name)
        if staged is not None:
            core.db.forget_unsent(staged.path.name)
            staged.close(remove=True)

    def settle(self, node: Node) -> None:
        """The last handle is closed and the content is in the store: the staging file becomes a cached version."""
        staged, cache = node.staged, self._core.cache
        if staged is not None and cache is not None and not node.gone and staged.size and staged.complete:
            cache.adopt(node.version(), staged.path)
        self.discard(node)

    # -- upload

    def owes(self, node: Node) -> bool:
        """Whether a close of the node has anything to send, or to make sure of."""
        staged = node.staged
        if staged is None or (node.gone and not node.lost):
            return False
        return staged.dirty or staged.published

    def flush(self, node: Node) -> None:
        """Make the store have what the node has. StoreError, FSError; what was not sent stays staged."""
        with self._core.tree.shared(), node.lock:
            self._confirm(node)
            self.send(node)

    def publish(self, node: Node) -> None:
        """As flush, before the close: others see what was written so far."""
        with self._core.tree.shared(), node.lock:
            self.send(node)
            if node.staged is not None and node.handles:
                node.staged.published = True

    def _confirm(self, node: Node) -> None:
        """The last close wins: what was published goes out again if another client wrote the file since."""
        staged = node.staged
        if staged is None or not staged.published:
            return
        staged.published = False
        if staged.dirty or staged.base is None:
            return
        try:
            replaced = self._core.store.head(staged.base.key).etag != staged.base.etag
        except NotFound:
            return
        if replaced and staged.complete:
            if node.lost:
                self._take_back(node)
            staged.touch()

    def send(self, node: Node, *, key: str | None = None, rename: IntentId | None = None) -> None:
        """As flush, with the tree lock and node.lock held; key: to write elsewhere, for a rename under way."""
        staged = node.staged
        if staged is None or not staged.dirty or node.gone:
            return
        destination = Destination(
            key or node.key,
            WriteOptions(metadata=to_metadata(node.attributes), content_type=node.attributes.content_type),
        )
        if staged.base_size:
            # A crash between the upload and its answer: the next mount knows the new version by this metadata.
            self.record(node)
        try:
            result = self._write(staged, destination)
        except (DatastoreError, OSError) as error:
            staged.error = str(error)
            self.record(node)
            log.warning("upload failed", extra=fields(path=node.path, error=staged.error))
            raise
        old_etag = node.etag
        with self._core.lock:
            node.size, node.etag = staged.size, result.etag
            node.mtime_ns = result.mtime_ns or self._core.now_ns()
            node.exact = node.racy = True
            node.checked_at = self._core.clock.monotonic()
            staged.uploaded(ObjectVersion(destination.key, result.etag, staged.size))
            if node.parent is not None:
                node.parent.pending.discard(node.name)
                self._resolver.changed(node)
        if rename is None:
            self._core.db.forget_unsent(staged.path.name)
        else:
            self._core.db.moved(rename, old_etag.replace(UNKNOWN, ""), staged.path.name)
        staged.journaled = False
        for name in [name for name, (_, left) in list(self._left.items()) if left.key == destination.key]:
            self._drop_left(name)

    def _write(self, staged: StagedFile, destination: Destination) -> WriteResult:
        try:
            return self._try_write(staged, destination)
        except FSError as error:
            if error.errno != errno.ESTALE or not self._recognised(staged):
                raise
            return self._try_write(staged, destination)
        finally:
            staged.attempt = destination.options.metadata

    def _recognised(self, staged: StagedFile) -> bool:
        """Whether the base was replaced by an upload of ours whose answer was lost; then that is the base from now on.

        What is not in the staging file is the same in both; the times in the metadata set equal files apart.
        """
        base = staged.base
        if base is None or staged.attempt is None:
            return False
        try:
            info = self._core.store.head(base.key)
        except NotFound:
            return False
        if dict(info.metadata) != dict(staged.attempt):
            return False
        staged.moved(ObjectVersion(base.key, info.etag, info.size))
        return True

    def _try_write(self, staged: StagedFile, destination: Destination) -> WriteResult:
        plan = plan_upload(staged.size, staged.base_size, staged.dirty_ranges)
        if not plan.parts:
            self.fill(staged, staged.missing(0, staged.size))
            return self._core.store.put(destination.key, staged.read(0, staged.size), destination.options)
        return self._write_parts(staged, destination, plan.parts)

    def _write_parts(self, staged: StagedFile, destination: Destination, parts: tuple[Part, ...]) -> WriteResult:
        store, key = self._core.store, destination.key
        for part in parts:
            if not part.copied:
                self.fill(staged, staged.missing(*part.byte_range))
        upload_id = store.create_upload(key, destination.options)

        def send(part: Part) -> tuple[PartNumber, ETag]:
            if part.copied:
                assert staged.base is not None
                base = staged.base
                return part.number, store.upload_part_copy(
                    key, upload_id, part.number, base.key, part.byte_range, base.etag
                )
            start, stop = part.byte_range
            return part.number, store.upload_part(key, upload_id, part.number, staged.read(start, stop - start))

        try:
            done = self._core.each(send, parts)
            return store.complete_upload(key, upload_id, done, destination.options)
        except PreconditionFailed as error:
            self._abort(key, upload_id)
            raise FSError(errno.ESTALE, "another client replaced the object that was being changed") from error
        except DatastoreError:
            self._abort(key, upload_id)
            raise

    def _abort(self, key: str, upload_id: UploadId) -> None:
        try:
            self._core.store.abort_upload(key, upload_id)
        except StoreError as error:
            log.warning("an unfinished upload stays behind", extra=fields(key=key, error=str(error)))

    # -- what an earlier process left

    def recover(self, node_of: Callable[[str], Node | None]) -> None:
        """Read the journal; what it lists is sent by retry(). Staging files that no row speaks of are removed.

        node_of: the node that has a key, when the kernel still knows it (the server was restarted under a live mount).
        """
        core = self._core
        rows = {row.staging: row for row in core.db.unsent()}
        for path in core.staging_dir.iterdir():
            if path.name not in rows:
                path.unlink()
        for name, row in rows.items():
            path = core.staging_dir / name
            if not path.exists():
                core.db.forget_unsent(name)
                continue
            base = ObjectVersion(row.base_key, ETag(row.base_etag), row.base_length) if row.base_key else None
            staged = StagedFile.recovered(path, base, row.base_size, row.since_ns)
            staged.error, staged.attempt = row.error, row.metadata
            node = node_of(row.key)
            if node is not None:
                self._reattach(node, staged, row)
                continue
            self._left[name] = (
                staged,
                Destination(row.key, WriteOptions(metadata=row.metadata, content_type=row.content_type)),
            )

    def _reattach(self, node: Node, staged: StagedFile, row: Unsent) -> None:
        defaults = self._core.settings.defaults.of(stat.S_IFREG, row.since_ns)
        node.attributes = from_metadata(row.metadata, stat.S_IFREG, defaults, row.content_type)
        node.staged, node.size = staged, staged.size
        # Whether there is an object, and of which version, nobody wrote down: a removal must try to remove it.
        node.etag = ETag(row.base_etag) or UNKNOWN
        if node.parent is not None:
            node.parent.pending.add(node.name)

    def retry(self, nodes: list[Node]) -> list[str]:
        """Send again what failed: files of this process and of earlier ones.

        Returns a line for each that failed again.
        """
        failures = []
        for node in nodes:
            try:
                self.flush(node)
                with node.lock:
                    if node.handles == 0 and not node.dirty:
                        self.settle(node)
                with self._core.lock:
                    self._core.nodes.drop_unused(node)
            except (DatastoreError, OSError) as error:
                failures.append(f"{os.fsdecode(node.path)}: {error}")
        for name, (staged, destination) in list(self._left.items()):
            try:
                self._write(staged, destination)
            except (DatastoreError, OSError) as error:
                staged.error = str(error)
                failures.append(f"{destination.key}: {error}")
                continue
            self._drop_left(name)
        return failures

    def _drop_left(self, name: str) -> None:
        """A file of an earlier process is sent, or a newer one took its place."""
        with self._core.lock:
            left = self._left.pop(name, None)
        if left is not None:
            self._core.db.forget_unsent(name)
            left[0].close(remove=True)

    def unsent(self) -> list[dict[str, object]]:
        """What is not in the store, for `datastore status`: path, bytes, since (ns), error or None."""
        with self._core.lock:
            dirty = [node for node in self._core.nodes.by_ino.values() if node.dirty and not node.gone]
        rows = [(os.fsdecode(node.path), node.staged) for node in dirty if node.staged is not None]
        rows += [(destination.key, staged) for staged, destination in self._left.values()]
        return [
            {"path": path, "bytes": staged.size, "since": staged.since_ns, "error": staged.error or None}
            for path, staged in rows
        ]
