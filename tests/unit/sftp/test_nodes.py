"""Which inode is which path, across renames and the death of the server."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from datastore.fuse.ops import ROOT_INO, FSError
from datastore.fuse.sftp.nodes import HIDDEN, Node, Nodes
from tests.promises import promise

FILE, DIRECTORY = stat.S_IFREG, stat.S_IFDIR


def fresh(state: Path, top: bytes = b"/srv/data") -> Nodes:
    nodes = Nodes(state, 100, top)
    assert nodes.begin() == []
    return nodes


def found(nodes: Nodes, directory: Node, name: bytes, kind: int = FILE) -> Node:
    (node,) = nodes.look_up(directory, [(name, kind)])
    return node


@pytest.mark.parametrize(("top", "path"), [(b"/", b"/d/f"), (b"/srv/", b"/srv/d/f"), (b"/srv", b"/srv/d/f")])
def test_a_path_begins_with_the_mounted_directory(tmp_path: Path, top: bytes, path: bytes) -> None:
    nodes = fresh(tmp_path, top)
    directory = found(nodes, nodes.get(ROOT_INO), b"d", DIRECTORY)
    assert nodes.path(found(nodes, directory, b"f")) == path
    assert nodes.path(directory, b"f") == path
    assert nodes.path(nodes.get(ROOT_INO)) == (top.rstrip(b"/") or b"/")


@promise("S-276")
def test_a_renamed_directory_takes_along_what_is_below(tmp_path: Path) -> None:
    """The next server knows it too."""
    nodes = fresh(tmp_path)
    root = nodes.get(ROOT_INO)
    directory = found(nodes, root, b"d", DIRECTORY)
    file, replaced = found(nodes, directory, b"f"), found(nodes, root, b"e", DIRECTORY)
    nodes.move(directory, root, b"e")
    successor = Nodes(tmp_path, 100, b"/srv/data")
    successor.resume()
    for each in (nodes, successor):
        assert each.path(each.get(file.ino)) == b"/srv/data/e/f"
    with pytest.raises(FSError) as gone:
        nodes.path(replaced)
    assert gone.value.errno == errno.ESTALE
    assert found(successor, successor.get(ROOT_INO), b"new").ino not in (file.ino, directory.ino, replaced.ino)


@promise("S-272")
def test_a_name_that_became_something_else_is_another_node(tmp_path: Path) -> None:
    nodes = fresh(tmp_path)
    root = nodes.get(ROOT_INO)
    file = found(nodes, root, b"x")
    assert found(nodes, root, b"x") is file
    assert found(nodes, root, b"x", DIRECTORY).ino != file.ino


def test_a_node_lives_as_long_as_somebody_needs_it(tmp_path: Path) -> None:
    nodes = fresh(tmp_path)
    directory = found(nodes, nodes.get(ROOT_INO), b"d", DIRECTORY)
    file = found(nodes, directory, b"f")
    found(nodes, directory, b"f")
    nodes.forget(directory.ino, 1)
    assert nodes.get(directory.ino) is directory  # the file's path goes by it
    file.opens = 1
    nodes.forget(file.ino, 2)
    assert nodes.get(file.ino) is file
    file.opens = 0
    nodes.let_go(file)
    assert set(nodes.by_ino) == {ROOT_INO}


@promise("S-274")
def test_hidden_files_are_found_after_a_death_and_by_the_next_mount(tmp_path: Path) -> None:
    """Whether the server was asked already, or not."""
    nodes = fresh(tmp_path)
    root = nodes.get(ROOT_INO)
    files = [found(nodes, root, name) for name in (b"asked", b"done")]
    for file in files:
        nodes.hide(file)
    nodes.move(files[1], root, nodes.hidden_name(files[1]), HIDDEN)
    paths = [nodes.hidden_path(file) for file in files]
    assert nodes.path(files[1]) == paths[1]
    removed = found(nodes, root, b"removed by another client", DIRECTORY)
    nodes.hide(found(nodes, found(nodes, removed, b"below", DIRECTORY), b"file"))
    nodes.detach(removed)
    found(nodes, root, b"written down with what is removed")
    assert nodes.hidden_paths() == paths
    successor = Nodes(tmp_path, 100, b"/srv/data")
    successor.resume()
    assert [successor.hidden_path(successor.get(file.ino)) for file in files] == paths
    again = Nodes(tmp_path, 100, b"/srv/data")
    assert again.begin() == paths
    assert again.hidden_name(files[0]) != nodes.path(files[1]).rpartition(b"/")[2]
