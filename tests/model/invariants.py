"""Checks of the invariants of inodes, staging files and journal (fuse/vfs/tree/nodes.py, fuse/data/staging.py)."""

from __future__ import annotations

import os
import stat
from collections import Counter

from datastore.fuse.data.staging import StagedFile
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from datastore.fuse.vfs.tree.nodes import Directory, Node
from tests.datachecks import check_extents


def check(fs: DatastoreFilesystem, *, restarted: bool = False) -> None:
    """Check the state while no call is in progress. restarted: files may be open of which this server does not know.
    Errors: AssertionError when an invariant is broken."""
    nodes = fs.core.nodes
    for ino, node in nodes.by_ino.items():
        assert node.ino == ino
        _check_place(fs, node)
        _check_content(node, restarted=restarted)
    opened = Counter(handle.node.ino for handle in fs.handles._by_fh.values())
    assert {n.ino: n.handles for n in nodes.by_ino.values() if n.handles} == opened
    _check_journal(fs)


def _check_place(fs: DatastoreFilesystem, node: Node) -> None:
    nodes = fs.core.nodes
    if isinstance(node, Directory):
        assert node.tail.endswith("/") or node is nodes.root
        for name, child in node.children.items():
            assert child.parent is node
            assert child.name == name
            assert not child.gone
            assert nodes.by_ino.get(child.ino) is child
    if node.parent is not None:
        assert node.gone or nodes.by_ino.get(node.parent.ino) is node.parent, (
            f"the parent of {node.path!r} is not known any more"
        )
        assert (node.parent.children.get(node.name) is node) == (not node.gone)


def _check_content(node: Node, *, restarted: bool) -> None:
    staged = node.staged
    if staged is None:
        return
    check_staged(staged)
    assert node.handles or staged.dirty or restarted, f"{node.path!r} keeps a staging file for nothing"
    assert node.size == staged.size or stat.S_ISLNK(node.attributes.mode)


def check_staged(staged: StagedFile) -> None:
    """Check one staging file."""
    check_extents(staged.present)
    check_extents(staged.dirty_ranges)
    for start, stop in staged.dirty_ranges:
        assert staged.present.contains(start, stop)
        assert stop <= staged.size
    assert os.fstat(staged.fd).st_size == staged.size
    assert staged.base_size <= staged.size
    assert staged.base is not None or staged.base_size == 0


def _check_journal(fs: DatastoreFilesystem) -> None:
    core = fs.core
    dirty = {node.staged.name for node in core.nodes.by_ino.values() if node.staged and node.dirty and not node.gone}
    # After a restart of the server, a file that was removed while open has its bytes in another directory.
    used = [node.staged.path for node in core.nodes.by_ino.values() if node.staged]
    staged = {path.name for path in used if path.parent == core.staging_dir}
    left = set(fs.uploads.orphans.files)
    rows = {row.staging for row in core.db.unsent()}
    assert rows == dirty | left, f"journal {rows} but unsent {dirty} and left {left}"
    files = {path.name for path in core.staging_dir.iterdir()}
    assert files == staged | left, f"staging files {files} but in use {staged | left}"
    assert [intent for intent in core.db.intents() if intent.kind != "discard"] == []
