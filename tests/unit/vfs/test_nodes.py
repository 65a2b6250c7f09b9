"""Nodes and their ids."""

from __future__ import annotations

import stat

import pytest

from datastore.fuse.ops import ROOT_INO, Ino
from datastore.fuse.vfs.tree.attrs import Defaults
from datastore.fuse.vfs.tree.listing import Listed
from datastore.fuse.vfs.tree.nodes import Directory, Node, NodeTable
from tests.promises import promise

DEFAULTS = Defaults(0, 0)


@pytest.fixture
def table() -> NodeTable:
    return NodeTable("prefix/", DEFAULTS.of(stat.S_IFDIR, 0))


def add(table: NodeTable, parent: Directory, name: str, kind: int = stat.S_IFREG) -> Node:
    tail = name + "/" * (kind == stat.S_IFDIR)
    return table.add(parent, name.encode(), Listed(kind, tail, 5), DEFAULTS.of(kind, 0))


def folder(table: NodeTable, parent: Directory, name: str) -> Directory:
    node = add(table, parent, name, stat.S_IFDIR)
    assert isinstance(node, Directory)
    return node


@promise("S-41")
def test_ids_are_the_same_at_the_next_mount(table: NodeTable) -> None:
    """They depend on the names alone."""
    twin = NodeTable("other/", DEFAULTS.of(stat.S_IFDIR, 0))
    for name in "abc":
        one, other = folder(table, table.root, name), folder(twin, twin.root, name)
        assert one.ino == other.ino == table.shown_ino(table.root, name.encode())
        assert add(table, one, "f").ino == add(twin, other, "f").ino
    assert twin.shown_ino(twin.root, b"new") == table.shown_ino(table.root, b"new")


@promise("S-41", "S-48")
def test_who_lets_go_of_a_node_late_leaves_the_next_of_its_id(table: NodeTable) -> None:
    """What was written behind a close, and removed or replaced meanwhile, is let go of once more."""
    old = add(table, table.root, "f")
    table.detach(old)
    new = add(table, table.root, "f")
    new.nlookup = 1
    assert new.ino == old.ino
    table.drop_unused(old)
    assert table.by_ino[new.ino] is new


@promise("S-41")
def test_ids_fit_a_double(table: NodeTable) -> None:
    """Tools that read JSON keep them."""
    inos = [add(table, table.root, f"n{number}").ino for number in range(1000)]
    assert len(set(inos)) == 1000
    assert all(1 < ino < 1 << 53 for ino in inos)


@promise("S-41")
def test_forgetting(table: NodeTable) -> None:
    """A node goes with its last lookup, and its directories with it, unless something holds them."""
    d = folder(table, table.root, "d")
    f, g = add(table, d, "f"), add(table, d, "g")
    for node in (d, f, g):
        node.nlookup = 2
    table.forget(f.ino, 1)
    assert f.ino in table.by_ino
    table.forget(f.ino, 1)
    assert f.ino not in table.by_ino
    assert b"f" not in d.children
    table.forget(d.ino, 5)
    assert d.ino in table.by_ino
    g.handles = 1
    table.forget(g.ino, 2)
    assert g.ino in table.by_ino
    g.handles = 0
    table.drop_unused(g)
    assert set(table.by_ino) == {ROOT_INO}
    table.forget(Ino(12345), 1)
    table.forget(ROOT_INO, 1)
    assert set(table.by_ino) == {ROOT_INO}
