"""What a new server takes over from one that died under a live mount (S-41, S-58, S-59).

Nodes, open files with the version that each is on, files that were removed while open, and renames that were cut off
come back from the state directory, in this order, before the first request is answered.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from ...data.staging import StagedFile
from ...ops import Ino
from ...state.nodelog import NodeRecord
from ...state.removed import Removed
from ...store.base import ETag
from ..tree import facts
from ..tree.attrs import from_metadata, to_metadata
from ..tree.core import Core
from ..tree.listing import Listed
from ..tree.nodes import Directory, Node
from .handles import Handles


def restore_nodes(core: Core) -> None:
    """The nodes that the kernel may still ask for; the store is asked about each when it is used."""
    waiting = list(core.nodelog.load().values())
    while waiting:
        rest = [record for record in waiting if not _restore_node(core, record)]
        if len(rest) == len(waiting):
            return
        waiting = rest


def _restore_node(core: Core, record: NodeRecord) -> bool:
    """False while its directory is not there yet."""
    parent = core.nodes.by_ino.get(record.parent)
    if not isinstance(parent, Directory):
        return False
    attributes = core.settings.defaults.of(record.kind, core.clock.time_ns())
    kind = record.kind if record.kind in (stat.S_IFDIR, stat.S_IFLNK) else stat.S_IFREG
    core.nodes.restore(Ino(record.ino), parent, record.name, Listed(kind, record.tail), attributes)
    return True


def restore_opens(core: Core, handles: Handles) -> None:
    """Open files go on with the version that they were on, and removed ones with their bytes."""
    held = core.opens.load()
    open_inos = {opened.ino for opened in held}
    unsent = {row.staging for row in core.db.unsent()}
    for row in core.removed.load():
        # With unsent bytes in the journal it was not removed yet: it has its name until the kernel asks for that again.
        if row.staging in unsent or row.ino not in open_inos or not _restore_removed(core, row):
            core.removed.forget(row.ino)
    for opened in held:
        node = core.nodes.by_ino.get(opened.ino)
        if node is None or isinstance(node, Directory):
            core.opens.remove(opened.fh)
            continue
        handles.restore(opened.fh, node, opened.flags)
        if opened.tag and not node.gone:
            facts.held(node, opened.size, ETag(opened.tag))
            node.pages_valid = True


def _restore_removed(core: Core, row: Removed) -> bool:
    """False when its bytes are not there."""
    if not row.hidden_key and not core.removed.content(row.ino).exists():
        return False
    node = core.nodes.by_ino.get(Ino(row.ino))
    parent = core.nodes.by_ino.get(row.parent, core.nodes.root)
    assert isinstance(parent, Directory)
    defaults = core.settings.defaults.of(stat.S_IFREG, core.clock.time_ns())
    if node is None:
        node = Node(Ino(row.ino), parent, os.fsencode(row.name), Listed(stat.S_IFREG, row.tail), defaults)
        node.nlookup = 1
        core.nodes.by_ino[node.ino] = node
    node.unlinked_key, size = row.hidden_key, row.size
    if not row.hidden_key:
        node.staged = StagedFile.recovered(core.removed.content(row.ino), None, 0, core.clock.time_ns())
        node.staged.dirty = False
        core.nodes.staged.add(node)
        size = node.staged.size
    facts.held(node, size, ETag(row.etag), from_metadata(row.metadata, stat.S_IFREG, defaults))
    if parent.children.get(node.name) is node:
        del parent.children[node.name]
    node.gone = True
    return True


def nodes_by_key(core: Core) -> Callable[[str], Node | None]:
    """Finds the node of a key, which the journal may know by the name before a directory's rename."""
    by_key = {node.key: node for node in core.nodes.by_ino.values() if not node.gone}
    moved = [(i.source, i.target) for i in core.db.intents() if i.kind == "rename-directory"]

    def find(key: str) -> Node | None:
        names = [key, *(new + key[len(old) :] for old, new in moved if key.startswith(old))]
        return next((by_key[name] for name in names if name in by_key), None)

    return find


def record_removed(core: Core, node: Node) -> None:
    """Before the object goes: what a new server would need for those who have the file open. node.lock is held."""
    if node.parent is None:
        return
    row = Removed(
        ino=node.ino,
        parent=node.parent.ino,
        name=os.fsdecode(node.name),
        tail=node.tail,
        hidden_key=node.unlinked_key,
        staging=node.staged.name if node.staged is not None else "",
        etag=node.etag,
        size=node.size,
        metadata=to_metadata(node.attributes),
    )
    core.removed.record(row, node.staged.path if node.staged is not None else None)
