"""The names that removed files have while they are open, of which a log in the state directory tells the next mount."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import cast

import pytest

from datastore.fuse.nfs import calls
from datastore.fuse.nfs.calls import Attributes
from datastore.fuse.nfs.client import Client, Credentials
from datastore.fuse.nfs.nodes import Nodes
from datastore.fuse.nfs.opened import OpenFiles
from datastore.fuse.state.nodelog import NodeLog
from tests.promises import promise


class Server:
    """Takes every call, or refuses it."""

    refuses = False

    def call(self, *_: object) -> None:
        if self.refuses:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@promise("S-265")
@pytest.mark.parametrize("refuses", [False, True])
def test_the_log_is_empty_after_a_mount_that_removed_them_all(tmp_path: Path, refuses: bool) -> None:
    """Then a node may forget the mount: the next one has nothing to remove."""
    server, log = Server(), tmp_path / "hidden.log"
    nodes = Nodes(NodeLog(tmp_path / "nodes.log"), 100)
    nodes.begin(b"root")
    files = OpenFiles(cast(Client, server), nodes, tmp_path)
    files.begin()
    (node,) = nodes.look_up([(b"handle", Attributes(stat.S_IFREG | 0o644, 1, 0, 0, 0, 0, 7, 0, 0, 0, 0))])
    files.hide(node, nodes.root(), Credentials(0, 0), calls.remove)
    assert log.stat().st_size
    server.refuses = refuses
    files.end()
    assert bool(log.stat().st_size) is refuses
