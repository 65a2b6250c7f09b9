"""What a page of keys means as a directory."""

from __future__ import annotations

import stat

from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.store.base import ETag, ListedObject, ListPage, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.vfs.tree.listing import Listed, claim, listing_of
from tests.memorystore import MemoryStore
from tests.promises import promise

FILE, FOLDER, LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


def listed(keys: list[str], prefixes: list[str], *, prefix: str = "d/") -> dict[bytes, tuple[int, str]]:
    """name -> (kind, tail) of one page."""
    objects = [ListedObject(prefix + key, 1, ETag("e"), 5) for key in keys]
    page = ListPage(objects, [prefix + common for common in prefixes], None)
    return {name: (one.kind, one.tail) for name, one in listing_of(prefix, [page], 1.0).entries.items()}


@promise("S-37")
def test_an_object_beside_a_directory() -> None:
    """The directory has the name, also when both are in different pages."""
    expected = {b"a": (FOLDER, "a/"), "a\uf000".encode(): (FILE, "a")}
    assert listed(["a"], ["a/"]) == expected
    first = ListPage([ListedObject("d/a", 1, ETag("e"), 5)], [], "more")
    second = ListPage([], ["d/a/"], None)
    entries = listing_of("d/", [first, second], 1.0).entries
    assert {name: (one.kind, one.tail) for name, one in entries.items()} == expected


@promise("S-155")
def test_a_page_that_begins_with_where_the_one_before_it_ended() -> None:
    """As a server may answer that is asked to go on after a directory."""
    first = ListPage([], ["d/a/", "d/b/"], "more")
    second = ListPage([ListedObject("d/c", 1, ETag("e"), 5)], ["d/b/"], None)
    listing = listing_of("d/", [first, second], 1.0)
    assert sorted(listing.entries) == [b"a", b"b", b"c"]
    assert [(span.after, span.upto) for span in listing.spans] == [("", "b/"), ("b/", "")]


@promise("S-06")
def test_the_suffix_alone_is_a_file() -> None:
    """A link needs a name."""
    assert listed([".rclonelink"], []) == {b".rclonelink": (FILE, ".rclonelink")}


@promise("S-28")
def test_an_unfinished_listing_says_so() -> None:
    """Its absent names prove nothing."""
    assert not listing_of("", [ListPage([], [], "more")], 1.0).complete
    assert listing_of("", [ListPage([], [], "more"), ListPage([], [], None)], 1.0).complete


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
def test_an_entry_of_ours_takes_its_name() -> None:
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
