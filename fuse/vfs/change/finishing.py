"""What an earlier process began and did not end: renames are rolled forward, discarded copies removed (S-27, S-58).

Under a live mount the kernel sends the cut-off rename again, and takes 'no such name' for done; by then the nodes have
to stand where the kernel will believe them, and who has the file open reads and writes at its new key.
"""

from __future__ import annotations

import errno
import math
import os
from contextlib import suppress
from functools import partial

from datastore.errors import NotFound, StoreError

from ...ops import FSError, Ino
from ...state.nodelog import NodeRecord
from ...state.rows import Intent, Subject
from ...store.base import ObjectInfo, ObjectVersion, user_metadata
from ..opened.restoring import record_removed
from ..tree import facts
from ..tree.core import Core
from ..tree.nodes import Directory, Node
from ..upload.copies import Copies, copy_object
from ..upload.uploads import Uploads
from .renames import CutOff, Renames


async def finish(core: Core, renames: Renames, uploads: Uploads, *, resumed: bool = False) -> list[str]:
    """End what the journal names; a line for each that failed, which stays in the journal.

    resumed: the mount lives on, and so may those who have removed files open: their copies stay.
    """
    failures = []
    for intent in core.db.intents():
        if intent.kind == "discard" and resumed:
            continue
        end = partial(_finish, core, renames, uploads, intent)
        try:
            await end()
        except (StoreError, OSError) as error:
            failures.append(f"{intent.kind} {os.fsencode(intent.source)!r}: {error}")
            with suppress(OSError):  # the disk is full
                core.db.put_off(intent.id, core.now_ns())
            if resumed:
                renames.cut_off.append(CutOff(intent, core.db.move_of(intent.id), end))
            continue
        core.db.end(intent.id)
    return failures


async def _finish(core: Core, renames: Renames, uploads: Uploads, intent: Intent) -> None:
    move, subject = core.db.move_of(intent.id), core.db.subject_of(intent.id)
    node = core.nodes.by_ino.get(Ino(move.ino)) if move is not None else None
    if intent.kind == "discard":
        await core.remove(intent.source)
    elif intent.kind == "rename-directory":
        copies = Copies(core, intent.source, intent.target, subject)
        await copies.make(keep_newer=True)
        if await _moved(core, uploads, move, node) and isinstance(node, Directory):
            await renames.follow(node, copies.made)
        await uploads.orphans.follow(intent.source, intent.target, copies.made)
        await copies.remove_originals()
    elif intent.kind == "remove":
        await _moved(core, uploads, move, node)
        await _remove(core, intent.source, subject._replace(etag=intent.target))
        await _remove_replaced(core, subject)
    elif node is not None and node.dirty and not node.gone:
        renames.begun.add((intent.source, intent.target))  # its bytes are here: the rename that is sent again does it
    elif uploads.orphans.waits_for(intent.source):
        # What is there would go to the new name, and what was meant to the old one.
        raise FSError(errno.EBUSY, "its bytes are not sent yet: they will be, under the old name")
    else:
        await _finish_file(core, uploads, intent, move, node)


async def _moved(core: Core, uploads: Uploads, move: NodeRecord | None, node: Node | None) -> bool:
    """Put a node where its rename was to put it; whether there is one. What was unsent of the name before is void."""
    parent = core.nodes.by_ino.get(Ino(move.parent)) if move is not None else None
    if move is None or not isinstance(parent, Directory):
        return False
    there = parent.children.get(move.name)
    if there is not None and there is not node:
        if there.handles and there.staged is not None:  # who has it open keeps its bytes
            record_removed(core, there)
        core.nodes.detach(there)
        await (uploads.forsake(there) if there.handles else uploads.discard(there))
    if node is None or node.gone:
        return False
    if there is not node:
        core.nodes.move(node, parent, move.name, move.tail)
        core.log_nodes((node,))
    return True


async def _finish_file(
    core: Core, uploads: Uploads, intent: Intent, move: NodeRecord | None, node: Node | None
) -> None:
    source, subject = intent.source, core.db.subject_of(intent.id)
    try:
        info = await core.store.head(source)
    except NotFound:
        return
    if not subject.includes(info.etag, info.mtime_ns) or await _used_anew(core, intent.target, subject, info):
        return
    async with uploads.orphans.superseded(intent.target, subject.put_off_ns or math.inf):
        result = await copy_object(core, ObjectVersion(source, info.etag, info.size), intent.target)
    if await _moved(core, uploads, move, node) and node is not None and node.etag == info.etag:
        facts.written(core, node, result, attrs_valid=node.attrs_valid)
    await core.remove(source)
    await _remove_replaced(core, subject)


async def _used_anew(core: Core, target: str, subject: Subject, source: ObjectInfo) -> bool:
    """Whether the new name was written since the rename was put off.

    By versions: what was there before, or the copy, which has another etag than its source if that is in parts.
    """
    if not subject.put_off_ns:
        return False
    try:
        there = await core.store.head(target)
    except NotFound:
        return False
    described = user_metadata(source.metadata)
    copied = bool(described) and there.size == source.size and user_metadata(there.metadata) == described
    return there.etag not in (subject.over, source.etag) and not copied


async def _remove_replaced(core: Core, subject: Subject) -> None:
    if subject.replaced:
        await _remove(core, subject.replaced, subject._replace(etag=subject.replaced_etag))


async def _remove(core: Core, key: str, subject: Subject) -> None:
    """Remove an object unless it was written anew."""
    with suppress(NotFound):
        info = await core.store.head(key)
        if subject.includes(info.etag, info.mtime_ns):
            await core.remove(key)
