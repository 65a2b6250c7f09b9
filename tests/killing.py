"""The end of a file system's process, for tests that have it in their own."""

from __future__ import annotations

from datastore.fuse.vfs.filesystem import DatastoreFilesystem


def kill(fs: DatastoreFilesystem) -> None:
    """The process dies: nothing is sent, written down or removed; its threads end and its files are closed."""
    core = fs.core
    fs.write_back.stop()
    core.io.shutdown(wait=True, cancel_futures=True)
    if core.cache is not None:
        core.cache.close()
    core.nodelog.close()
    core.db.close()
    unsent = [node.staged for node in core.nodes.by_ino.values() if node.staged is not None]
    for staged in (*unsent, *(left.staged for left in fs.uploads.orphans.files.values())):
        staged.close(remove=False)
