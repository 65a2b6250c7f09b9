"""Objects `dir` of other tools that stand for a directory (S-165) become `dir/` before it is changed."""

from __future__ import annotations

import errno
from contextlib import suppress

from datastore.errors import AlreadyExists, NotFound

from ...ops import FSError
from ...store.base import WriteOptions
from ..tree.attrs import DIRECTORY_TYPE, stands_for_directory, to_metadata
from ..tree.core import Core
from ..tree.nodes import Directory


async def put_marker(core: Core, directory: Directory) -> None:
    """Give a directory its marker, unless it has one. The tree lock is held."""
    metadata = to_metadata(directory.attributes)
    options = WriteOptions(metadata=metadata, content_type=DIRECTORY_TYPE, if_none_match=True)
    with suppress(AlreadyExists):
        await core.store.put(directory.key, b"", options)
    directory.marker = True


async def replace_stand_in(core: Core, directory: Directory) -> None:
    """Give a directory the marker that every server and tool takes for one. FSError(ESTALE): it is none any more."""
    parent = directory.parent
    if parent is None or not directory.stood_in():
        return
    async with core.tree.shared(), directory.lock:
        key = directory.key[:-1]
        with suppress(NotFound):
            found = await core.store.head(key)
            if not stands_for_directory(found.key, found.size, found.content_type):
                raise FSError(errno.ESTALE)
            # versitygw has no place for both.
            await core.store.delete(key, if_match=found.etag)
            core.known.forget(key)
        await put_marker(core, directory)
        parent.stand_ins.pop(directory.tail[:-1], None)
