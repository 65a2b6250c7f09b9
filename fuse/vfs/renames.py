"""Renames (S-25 to S-27): copies on the server, written down before they begin so that a half-done one is finished."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

from datastore.errors import NotFound, StoreError

from ..data.version import ObjectVersion
from ..ops import FSError, Ino
from ..store.base import ListedObject, WriteResult
from .changes import Changes
from .copies import copy_object
from .core import Core
from .names import KEY_MAX, LINK_SUFFIX, NAME_MAX, creatable, segment_of
from .nodes import Directory, Node
from .remote import UNLINKED
from .resolver import Resolver
from .uploads import Uploads

NOREPLACE = 1
"""RENAME_NOREPLACE of rename(2)."""
DELETE_MAX = 1000
"""Keys of one bulk delete (S3 API reference, DeleteObjects)."""


class Renames:
    """Renames of files (atomic for readers of either name) and of directories (not atomic, but always finished)."""

    def __init__(self, core: Core, resolver: Resolver, uploads: Uploads, changes: Changes) -> None:
        self._core = core
        self._resolver = resolver
        self._uploads = uploads
        self._changes = changes

    def rename(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int) -> None:
        """rename(2) with RENAME_NOREPLACE; FSError(EINVAL) for other flags."""
        if flags & ~NOREPLACE:
            raise FSError(errno.EINVAL)
        if len(new_name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        if not creatable(new_name):
            raise FSError(errno.EINVAL)
        source_directory = self._resolver.directory(parent)
        target_directory = self._resolver.directory(new_parent)
        source = self._resolver.existing(source_directory, name)
        target = self._resolver.find(target_directory, new_name)
        if target is source:
            return
        if target is not None:
            self._check_target(source, target, flags)
        if isinstance(source, Directory):
            with self._core.tree.exclusive():
                self._rename_directory(source, target, target_directory, new_name)
        else:
            with self._core.tree.shared():
                self._rename_file(source, target, target_directory, new_name)

    def _check_target(self, source: Node, target: Node, flags: int) -> None:
        if flags & NOREPLACE:
            raise FSError(errno.EEXIST)
        if isinstance(target, Directory):
            if not isinstance(source, Directory):
                raise FSError(errno.EISDIR)
            self._changes.check_empty(target)
        elif isinstance(source, Directory):
            raise FSError(errno.ENOTDIR)

    # -- files

    def _rename_file(self, source: Node, target: Node | None, directory: Directory, name: bytes) -> None:
        core = self._core
        if source.gone or source.parent is None:
            raise FSError(errno.ENOENT)
        tail = segment_of(name) + (LINK_SUFFIX if source.tail.endswith(LINK_SUFFIX) else "")
        new_key = self._new_key(directory, tail)
        self._changes.ensure_marker(source.parent)
        with ExitStack() as locks:
            for node in sorted((n for n in (source, target) if n is not None), key=lambda n: n.ino):
                locks.enter_context(node.lock)
            if target is not None:
                self._changes.keep_open_content(target)
            old_key, had_object = source.key, bool(source.etag)
            intent = core.db.begin("rename-file", old_key, new_key)
            try:
                self._move_content(source, new_key)
            except (StoreError, FSError, OSError):
                core.db.end(intent)
                raise
            self._moved(source, target, directory, name, tail)
            if had_object:
                core.store.delete(old_key)
            core.db.end(intent)

    def _move_content(self, source: Node, new_key: str) -> None:
        """Make the object at the new key: by upload if the store lacks it, else by a copy."""
        if source.dirty:
            self._uploads.send(source, key=new_key)
            return
        try:
            result = copy_object(self._core, source.version(), new_key)
        except NotFound as error:
            raise FSError(errno.ENOENT) from error
        self._adopt_version(source, new_key, result)

    def _adopt_version(self, node: Node, key: str, result: WriteResult) -> None:
        with self._core.lock:
            node.etag = result.etag
            node.mtime_ns = result.mtime_ns or self._core.now_ns()
            node.racy = True
            node.checked_at = self._core.clock.monotonic()
            if node.staged is not None:
                node.staged.moved(ObjectVersion(key, result.etag, node.size))

    def _moved(self, source: Node, target: Node | None, directory: Directory, name: bytes, tail: str) -> None:
        """The tree follows. The nodes' locks are held."""
        core = self._core
        old_target_key = target.key if target is not None else ""
        if target is not None:
            self._changes.disappeared(target)
        with core.lock:
            old_parent, old_name = source.parent, source.name
            assert old_parent is not None
            self._resolver.removed(old_parent, old_name)
            self._resolver.touched(old_parent)
            old_parent.pending.discard(old_name)
            core.nodes.move(source, directory, name, tail)
            core.log_nodes((source,))
            source.attributes = source.attributes._replace(ctime_ns=core.now_ns())
            if source.dirty:
                directory.pending.add(name)
            self._resolver.changed(source)
            self._resolver.touched(directory)
            if isinstance(source, Directory):
                self._resolver.counted(old_parent, -1)
                self._resolver.counted(directory, 1)
        self._uploads.record(source)
        if old_target_key and old_target_key != source.key and not isinstance(target, Directory):
            core.store.delete(old_target_key)

    def _new_key(self, directory: Directory, tail: str) -> str:
        key = directory.key + tail
        if directory.gone:
            raise FSError(errno.ENOENT)
        if len(key.encode("utf-8", "surrogateescape")) > KEY_MAX:
            raise FSError(errno.ENAMETOOLONG)
        if directory is self._core.nodes.root and tail == UNLINKED:
            raise FSError(errno.EEXIST)
        return key

    # -- directories

    def _rename_directory(self, source: Directory, target: Node | None, directory: Directory, name: bytes) -> None:
        core = self._core
        if source.gone or source.parent is None:
            raise FSError(errno.ENOENT)
        tail = segment_of(name) + "/"
        old_prefix, new_prefix = source.key, self._new_key(directory, tail)
        if new_prefix.startswith(old_prefix):
            raise FSError(errno.EINVAL)
        self._changes.ensure_marker(source.parent)
        self._changes.ensure_marker(source)
        intent = core.db.begin("rename-directory", old_prefix, new_prefix)
        results = copy_below(core, old_prefix, new_prefix)
        self._moved(source, target, directory, name, tail)
        self._follow(source, results)
        delete_below(core, old_prefix)
        core.db.end(intent)

    def _follow(self, top: Directory, results: dict[str, WriteResult]) -> None:
        """What is known below a renamed directory is of other keys, and perhaps other etags, now."""
        waiting: list[Node] = [top]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Directory):
                with self._core.lock:
                    node.listing = None
                    waiting.extend(node.children.values())
                continue
            result = results.get(node.key)
            if result is not None and not node.dirty:
                self._adopt_version(node, node.key, result)
            elif result is not None and node.staged is not None and node.staged.base is not None:
                node.staged.moved(ObjectVersion(node.key, result.etag, node.staged.base.size))
            self._uploads.record(node)


def copy_below(core: Core, old_prefix: str, new_prefix: str) -> dict[str, WriteResult]:
    """Copy every object below a prefix to another, side by side; results by new key."""
    results: dict[str, WriteResult] = {}

    def copy(found: ListedObject) -> None:
        new_key = new_prefix + found.key[len(old_prefix) :]
        results[new_key] = copy_object(core, ObjectVersion(found.key, found.etag, found.size), new_key)

    token: str | None = None
    while True:
        page = core.store.list_page(old_prefix, token=token)
        core.each(copy, page.objects)
        token = page.next_token
        if token is None:
            return results


def delete_below(core: Core, prefix: str) -> None:
    """Delete every object below a prefix. FSError(EIO) when the store keeps some."""
    while True:
        page = core.store.list_page(prefix, max_keys=DELETE_MAX)
        if not page.objects:
            return
        failures = core.store.delete_many([found.key for found in page.objects])
        if failures:
            first = failures[0]
            raise FSError(
                errno.EIO, f"{len(failures)} objects below {prefix} could not be removed: {first.key}: {first.message}"
            )


def finish(core: Core) -> list[str]:
    """What an earlier process began and did not end: renames are rolled forward, discarded copies removed.

    Returns a line for each that failed; it stays in the journal.
    """
    failures = []
    for intent in core.db.intents():
        try:
            if intent.kind == "discard":
                core.store.delete(intent.source)
            elif intent.kind == "rename-directory":
                copy_below(core, intent.source, intent.target)
                delete_below(core, intent.source)
            else:
                _finish_file(core, intent.source, intent.target)
        except (StoreError, OSError) as error:
            failures.append(f"{intent.kind} {os.fsencode(intent.source)!r}: {error}")
            continue
        core.db.end(intent.id)
    return failures


def _finish_file(core: Core, source: str, target: str) -> None:
    try:
        info = core.store.head(source)
    except NotFound:
        return
    copy_object(core, ObjectVersion(source, info.etag, info.size), target)
    core.store.delete(source)
