"""Single names of a large directory: what one is, without listing all the others."""

from __future__ import annotations

import stat
from functools import partial

from datastore.errors import KeyTooLong, NotFound

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
    tail = segment + (LINK_SUFFIX if kind == stat.S_IFLNK else "")
    key, learn = parent.key + tail, core.known.asking()
    try:
        if not core.settings.full_attributes:
            page = await core.store.list_page(key, max_keys=1)
            found = next((one for one in page.objects if one.key == key), None)
            return Listed(kind, tail, found.size, found.etag, found.mtime_ns) if found is not None else None
        info = await core.store.head(key)
    except (NotFound, KeyTooLong):
        return None
    learn(info)
    if stands_for_directory(key, info.size, info.content_type):
        parent.stand_ins[tail] = (info.etag, info.mtime_ns // 1_000_000_000)
        return Listed(stat.S_IFDIR, tail + "/")
    return Listed(kind, tail, info.size, info.etag, info.mtime_ns)
