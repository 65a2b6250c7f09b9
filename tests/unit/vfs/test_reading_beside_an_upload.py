"""S-29: what this mount wrote can be read while it is on its way to the store."""

from __future__ import annotations

import os
import threading

from datastore.fuse.ops import Blocking
from tests.mounted import Client, World
from tests.patience import PATIENCE_S
from tests.promises import promise


@promise("S-29")
def test_a_file_is_read_while_it_is_uploaded(world: World, one: Client) -> None:
    """The upload holds the node's lock; bytes that are in the staging file need not wait for it."""
    with one.local.opened("file", os.O_CREAT | os.O_RDWR) as file:
        file.write(b"written")
        node = one.fs.core.nodes.by_ino[file.ino]
        taken, done = threading.Event(), threading.Event()

        def upload() -> None:
            with node.lock:
                taken.set()
                done.wait(PATIENCE_S)

        thread = threading.Thread(target=upload)
        thread.start()
        try:
            assert taken.wait(PATIENCE_S)
            body = one.fs.read(file.ino, file._fh, 0, 100)
            assert not isinstance(body, Blocking)
            assert bytes(body) == b"written"
        finally:
            done.set()
            thread.join()
