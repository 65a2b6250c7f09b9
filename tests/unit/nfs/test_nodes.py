"""The table of nodes: inode numbers, its log, its limit."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from datastore.fuse.fileserver import LOG_SLACK
from datastore.fuse.nfs.calls import Attributes
from datastore.fuse.nfs.nodes import Nodes
from datastore.fuse.ops import ROOT_INO, FSError
from datastore.fuse.state.nodelog import NodeLog
from tests.mounted import Kernel
from tests.promises import promise

ROOT = b"root"


def attributes(fileid: int, kind: int = stat.S_IFREG) -> Attributes:
    return Attributes(kind | 0o644, 1, 0, 0, 0, 0, fileid, 0, 0, 0, 0)


def fresh(path: Path, limit: int = 1000) -> Nodes:
    nodes = Nodes(NodeLog(path), limit)
    nodes.begin(ROOT)
    return nodes


def resumed(path: Path) -> Nodes:
    nodes = Nodes(NodeLog(path), 1000)
    nodes.resume()
    return nodes


@promise("S-263")
def test_inode_numbers_are_the_servers_as_far_as_they_are_free(tmp_path: Path) -> None:
    """Two objects of one number (of two exports, or a number used again) differ all the same."""
    nodes = fresh(tmp_path / "log")
    one, two, again = nodes.look_up([(b"a", attributes(77)), (b"b", attributes(77)), (b"a", attributes(77))])
    assert one is again
    assert one.ino == 77
    assert two.ino != 77
    assert nodes.look_up([(b"r", attributes(ROOT_INO)), (b"z", attributes(0))])[0].ino != ROOT_INO
    assert len({node.ino for node in nodes.by_ino.values()}) == len(nodes.by_ino) == 5


@promise("S-260")
def test_a_new_process_knows_what_the_kernel_knows(tmp_path: Path) -> None:
    nodes = fresh(tmp_path / "log")
    nodes.look_up([(b"a", attributes(7)), (b"b", attributes(7)), (b"d\0\n", attributes(9, stat.S_IFDIR))])
    nodes.look_up([(b"gone", attributes(10))])
    nodes.forget(10, 1)
    nodes.look_up([(b"a", attributes(7)), (b"reused", attributes(10))])
    nodes.move_root(b"new root")
    told = {node.ino: (node.handle, node.kind) for node in nodes.by_ino.values()}
    later = resumed(tmp_path / "log")
    assert {node.ino: (node.handle, node.kind) for node in later.by_ino.values()} == told
    assert later.root().handle == b"new root"
    assert later.of(b"b") is later.by_ino[later.look_up([(b"b", attributes(7))])[0].ino]


def test_a_node_lives_as_long_as_its_lookups(tmp_path: Path) -> None:
    nodes = fresh(tmp_path / "log")
    for _ in range(3):
        nodes.look_up([(b"a", attributes(7))])
    nodes.forget(7, 2)
    assert nodes.get(7).handle == b"a"
    nodes.forget(7, 1)
    nodes.forget(7, 1)
    with pytest.raises(FSError):
        nodes.get(7)
    nodes.forget(ROOT_INO, 100)
    assert nodes.root().handle == ROOT


def test_the_log_does_not_grow_with_the_work(tmp_path: Path) -> None:
    path = tmp_path / "log"
    nodes = fresh(path)
    for number in range(LOG_SLACK):
        nodes.look_up([(b"%d" % number, attributes(number + 2))])
        nodes.forget(number + 2, 1)
    size = path.stat().st_size
    for number in range(LOG_SLACK):
        nodes.look_up([(b"%d" % number, attributes(number + 2))])
        nodes.forget(number + 2, 1)
    assert path.stat().st_size <= size


@promise("S-260")
def test_what_can_not_be_written_down_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the state directory is full."""
    nodes = fresh(tmp_path / "log")

    def full(*_: object) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(NodeLog, "append", full)
        with pytest.raises(OSError, match="full"):
            nodes.look_up([(b"a", attributes(7))])
        assert nodes.of(b"a") is None
    assert nodes.look_up([(b"a", attributes(7))])[0].ino == 7


@promise("S-271")
def test_beyond_the_limit_the_oldest_unused_files_are_asked_for(tmp_path: Path) -> None:
    nodes = fresh(tmp_path / "log", limit=10)
    for number in range(100, 130):
        nodes.look_up([(b"%d" % number, attributes(number))])[0].opens = number == 100
    nodes.notifier = kernel = Kernel()
    nodes.look_up([(b"d", attributes(5, stat.S_IFDIR))])
    asked = [held.ino for held in kernel.released]
    assert asked[0] == 101
    assert len(asked) >= 20
    assert not {100, 5, ROOT_INO} & set(asked)
