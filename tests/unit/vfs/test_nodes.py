"""Nodes and their ids, and what a page of keys means as a directory."""

from __future__ import annotations

import ast
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.ops import ROOT_INO, Ino
from datastore.fuse.store.base import ETag, ListedObject, ListPage, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.vfs.tree.attrs import Defaults
from datastore.fuse.vfs.tree.listing import Listed, claim, listing_of
from datastore.fuse.vfs.tree.nodes import Directory, Node, NodeTable
from tests.memorystore import MemoryStore
from tests.promises import promise

DEFAULTS = Defaults(0, 0)
VFS = Path(__file__).parents[3] / "fuse" / "vfs"


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
    """They depend on the names alone, and fit a double: tools that read JSON keep them."""
    twin = NodeTable("other/", DEFAULTS.of(stat.S_IFDIR, 0))
    for name in "abc":
        one, other = folder(table, table.root, name), folder(twin, twin.root, name)
        assert one.ino == other.ino
        assert add(table, one, "f").ino == add(twin, other, "f").ino
    assert twin.free_ino(twin.root.ino, b"new") == table.free_ino(table.root.ino, b"new")
    inos = [add(table, table.root, f"n{number}").ino for number in range(1000)]
    assert len(set(inos)) == 1000
    assert all(1 < ino < 1 << 53 for ino in inos)


@promise("S-41", "S-48")
def test_a_late_release_of_a_removed_node_keeps_the_new_node_of_its_id(table: NodeTable) -> None:
    """What was written behind a close, and removed or replaced meanwhile, is let go of once more."""
    old = add(table, table.root, "f")
    table.detach(old)
    new = add(table, table.root, "f")
    new.nlookup = 1
    assert new.ino == old.ino
    table.drop_unused(old)
    assert table.by_ino[new.ino] is new


@promise("S-41")
def test_a_node_goes_with_its_last_lookup_unless_something_holds_it(table: NodeTable) -> None:
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


def test_only_the_owner_assigns_what_is_known_of_a_node() -> None:
    """That is `vfs/tree/facts.py`; `nodes.py` makes nodes, and gives them what they begin with."""
    known = "asked_at attributes attrs_valid checked_at etag made_at mtime_ns racy size told"
    found = [
        f"{name}:{target.lineno} assigns .{target.attr}"
        for path in sorted(VFS.rglob("*.py"))
        if (name := str(path.relative_to(VFS))) not in {"tree/facts.py", "tree/nodes.py"}
        for target in ast.walk(ast.parse(path.read_text()))
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and target.attr in known.split()
    ]
    assert not found, "call a function of tree/facts.py instead"


FILE, FOLDER, LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


def listed(keys: list[str], prefixes: list[str], *, prefix: str = "d/") -> dict[bytes, tuple[int, str]]:
    """name -> (kind, tail) of one page."""
    objects = [ListedObject(prefix + key, 1, ETag("e"), 5) for key in keys]
    page = ListPage(objects, [prefix + common for common in prefixes], None)
    return {name: (one.kind, one.tail) for name, one in listing_of(prefix, [page], 1.0).entries.items()}


@promise("S-37", "S-28", "S-06")
def test_an_object_beside_a_directory() -> None:
    """The directory has the name, also when both are in different pages; absent names of the first prove nothing.

    A link needs a name: the suffix alone is a file.
    """
    assert listed([".rclonelink"], []) == {b".rclonelink": (FILE, ".rclonelink")}
    expected = {b"a": (FOLDER, "a/"), "a\uf000".encode(): (FILE, "a")}
    assert listed(["a"], ["a/"]) == expected
    first = ListPage([ListedObject("d/a", 1, ETag("e"), 5)], [], "more")
    second = ListPage([], ["d/a/"], None)
    listing = listing_of("d/", [first, second], 1.0)
    assert {name: (one.kind, one.tail) for name, one in listing.entries.items()} == expected
    assert [listing_of("d/", pages, 1.0).complete for pages in ([first], [first, second])] == [False, True]


@promise("S-155")
def test_a_page_that_begins_with_where_the_one_before_it_ended() -> None:
    """As a server may answer that is asked to go on after a directory."""
    first = ListPage([], ["d/a/", "d/b/"], "more")
    second = ListPage([ListedObject("d/c", 1, ETag("e"), 5)], ["d/b/"], None)
    listing = listing_of("d/", [first, second], 1.0)
    assert sorted(listing.entries) == [b"a", b"b", b"c"]
    assert [(span.after, span.upto) for span in listing.spans] == [("", "b/"), ("b/", "")]


@promise("S-03")
def test_servers_that_list_markers_as_objects_and_directories_twice() -> None:
    """gofakes3 and s3proxy do: of each directory there is one entry, and a name with a slash would fail the readdir."""
    expected = {b"a": (FOLDER, "a/"), b"b": (FOLDER, "b/"), b"c": (FILE, "c")}
    assert listed(["a/", "b/", "c"], ["a/"]) == expected
    pages = [ListPage([], ["d/a/", "d/b/"], "more"), ListPage([ListedObject("d/c", 1, ETag("e"), 5)], ["d/a/"], None)]
    shown = listing_of("d/", pages, 1.0).entries
    assert {name: (one.kind, one.tail) for name, one in shown.items()} == expected


tails = st.lists(
    st.sampled_from(["a", "a/b", "a/", "a.rclonelink", "a.rclonelink/x", "a\uf000", ".", "./b", "/b", "\uf02e", "b"])
)


@promise("S-36", "S-37")
@given(tails)
def test_every_key_has_a_name(keys: list[str]) -> None:
    """Of any set of keys, each is shown under a name, and no two under one."""
    store = BlockingStore(MemoryStore())
    for key in keys:
        store.put("d/" + key, b"", WriteOptions())
    page = store.list_page("d/", delimiter="/")
    listing = listing_of("d/", [page], 1.0)
    shown = sorted(one.tail for one in listing.entries.values())
    assert shown == sorted({key.partition("/")[0] + "/" * ("/" in key) for key in keys})
    assert not any(b"/" in name for name in listing.entries)


@promise("S-37")
def test_an_entry_made_here_takes_its_name_from_the_listed_one() -> None:
    """What had the name in the listing is shown beside, as the next listing would."""
    entries = {b"a": Listed(FILE, "a")}
    claim(entries, b"a", Listed(FOLDER, "a/"))
    assert {name: one.tail for name, one in entries.items()} == {b"a": "a/", "a\uf000".encode(): "a"}
    entries = {b"x": Listed(LINK, "x.rclonelink")}
    claim(entries, b"x", Listed(FILE, "x"))
    assert entries == {b"x": Listed(FILE, "x"), b"x.rclonelink": Listed(FILE, "x.rclonelink")}
    entries = {b"f": Listed(FILE, "f", 1)}
    claim(entries, b"f", Listed(FILE, "f", 2))
    assert entries == {b"f": Listed(FILE, "f", 2)}
