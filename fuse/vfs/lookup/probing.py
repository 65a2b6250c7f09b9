"""Single names of a large directory: what one is, without listing all the others."""

from __future__ import annotations

import stat
from functools import partial

from datastore.errors import KeyTooLong, NotFound

from ...store.base import ETag
from ..tree.attrs import stands_for_directory
from ..tree.core import Core
from ..tree.listing import Listed
from ..tree.names import LINK_SUFFIX, segment_of
from ..tree.nodes import Directory


async def probe(core: Core, parent: Directory, name: bytes) -> Listed | None:
    """What a name of one_key() is, without listing the directory: a directory before a file before a link."""
    segment = segment_of(name)
    place = parent.place
    kinds = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK)
    found = await core.each(partial(_probe_kind, core, parent, segment), kinds)
    if parent.place != place:
        return await probe(core, parent, name)
    return next((listed for listed in found if listed is not None), None)


async def _probe_kind(core: Core, parent: Directory, segment: str, kind: int) -> Listed | None:
    if kind == stat.S_IFDIR:
        page = await core.store.list_page(parent.key + segment + "/", max_keys=1)
        return Listed(stat.S_IFDIR, segment + "/") if page.objects else None
    try:
        return await _probe_key(core, parent, segment + (LINK_SUFFIX if kind == stat.S_IFLNK else ""), kind)
    except (NotFound, KeyTooLong):
        return None


async def _probe_key(core: Core, parent: Directory, tail: str, kind: int) -> Listed | None:
    key = parent.key + tail
    if not core.settings.full_attributes:
        page = await core.store.list_page(key, max_keys=1)
        if page.objects and page.objects[0].key == key:
            found = page.objects[0]
            return Listed(kind, tail, found.size, found.etag, found.mtime_ns)
        return None
    learn = core.known.asking()
    info = await core.store.head(key)
    learn(info)
    if stands_for_directory(key, info.size, info.content_type):
        parent.stand_ins[tail] = (info.etag, info.mtime_ns // 1_000_000_000)
        return Listed(stat.S_IFDIR, tail + "/")
    return Listed(kind, tail, info.size, ETag(info.etag), info.mtime_ns)
