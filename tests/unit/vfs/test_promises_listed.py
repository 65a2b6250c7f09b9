"""Attributes that come with the listing (docs/SEMANTICS.md S-129, S-130), from a store whose listings show metadata."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datastore.fuse.ops import Attr
from datastore.fuse.store.base import WriteOptions
from tests.mounted import Client, World
from tests.mounted import world as opened
from tests.promises import promise

FILES = 40
LINK = "%s/away" % ("a" * 20)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened(tmp_path, listed_metadata=True) as made:
        yield made


def fill(world: World) -> None:
    """Objects of several tools."""
    for number in range(FILES):
        world.put(f"f{number:02}", b"x", mode=str(stat.S_IFREG | 0o600), uid="7", gid="8", mtime="1500000000.000000007")
    world.put("of-others", b"y", who="somebody")
    world.put("of-rclone", b"z", mtime="1400000000.5")
    world.put("sparse", b"", mode="no number")
    world.put("link.rclonelink", LINK.encode(), mode=str(stat.S_IFLNK | 0o777))
    world.put("geese", b"", **{"--symlink-target": "to%20there"})
    world.put("pipe", b"", mode=str(stat.S_IFIFO | 0o640))
    world.put("extended", b"", xattr="%7B%22user.a%22%3A%22YQ%3D%3D%22%7D")
    world.put("dir/", b"", mode=str(stat.S_IFDIR | 0o2751), uid="9")
    world.put("dir/inner", b"inner", mode=str(stat.S_IFREG | 0o640))
    world.put("bare/inner", b"inner", mode=str(stat.S_IFREG | 0o604))


def walk(client: Client, top: str = "") -> dict[str, Attr]:
    """All there is, as `ls -lR` sees it."""
    seen: dict[str, Attr] = {}
    for name, _ in client.local.scandir(top, plus=True):
        path = os.path.join(top, os.fsdecode(name))
        seen[path] = client.local.stat(path)
        if stat.S_ISDIR(seen[path].mode):
            seen |= walk(client, path)
    return seen


@promise("S-129")
def test_a_walk_asks_for_no_file(world: World, one: Client) -> None:
    """One HEAD for each directory, as long as its own listing was not read; later look-ups cost one listing for all."""
    fill(world)
    world.later()
    assert len(walk(one)) == FILES + 11
    assert one.calls("head") == len(("dir", "bare"))
    world.later()
    walk(one)
    assert one.calls("head") <= 2 * len(("dir", "bare"))
    world.later(5)
    heads, listings = one.calls("head"), one.calls("list_page")
    for number in range(FILES):
        assert one.local.stat(f"f{number:02}").uid == 7
    assert (one.calls("head") - heads, one.calls("list_page") - listings) == (0, 1)


@promise("S-129")
def test_what_is_shown_is_what_a_head_would_show(world: World) -> None:
    """Modes, owners, times, links, special files and extended attributes, of every tool."""
    fill(world)
    world.later(5)
    one = world.client()
    listed = walk(one)
    asked = one.calls("head")
    world.bucket.capabilities = replace(world.bucket.capabilities, listed_metadata=False)
    other = world.client()
    assert walk(other) == listed
    assert other.calls("head") > FILES > asked
    assert one.local.readlink("geese") == other.local.readlink("geese") == b"to there"
    assert one.local.getxattr("extended", b"user.a") == other.local.getxattr("extended", b"user.a") == b"a"


@promise("S-129")
def test_times_are_as_exact_as_those_of_a_head(world: World, one: Client) -> None:
    """In whole seconds where no metadata say more, whichever of the two told them."""
    world.clock.advance(0.345)
    start_ns = world.clock.time_ns()
    world.put("f", b"")
    seen = walk(one)["f"]
    assert seen.mtime_ns == seen.ctime_ns == start_ns // 1_000_000_000 * 1_000_000_000


@promise("S-129", "S-11")
def test_metadata_of_others_survives_a_chmod(world: World, one: Client) -> None:
    fill(world)
    world.tool.put("typed", b"t", WriteOptions(metadata={"who": "me"}, content_type="image/png"))
    world.later()
    one.local.scandir(plus=True)
    one.local.chmod("typed", 0o601)
    info = world.tool.head("typed")
    assert (info.metadata["who"], info.content_type) == ("me", "image/png")
    assert info.metadata["mode"] == str(stat.S_IFREG | 0o601)


@promise("S-130")
@pytest.mark.parametrize("pause_s", [0.0, 5.0])
def test_a_change_of_attributes_alone_is_seen(world: World, one: Client, pause_s: float) -> None:
    """Also one in the very second in which the object was written, which only the metadata tell."""
    fill(world)
    walk(one)
    world.later(pause_s)
    other = world.client()
    other.local.chmod("f07", 0o641)
    other.local.chmod("dir/inner", 0o611)
    world.later()
    seen = walk(one)
    assert [stat.S_IMODE(seen[path].mode) for path in ("f07", "dir/inner", "f08")] == [0o641, 0o611, 0o600]


@promise("S-130")
@pytest.mark.parametrize("still", [True, False])
def test_a_second_change_within_the_second_is_seen(world: World, one: Client, still: bool) -> None:
    """Version and LastModified are the same before and after it.

    Also where a listing shows metadata no more: the right to read the object was taken away, or another server answers.
    """
    world.put("f", b"x", mode=str(stat.S_IFREG | 0o600))
    assert stat.S_IMODE(walk(one)["f"].mode) == 0o600
    world.bucket.capabilities = replace(world.bucket.capabilities, listed_metadata=still)
    world.put("f", b"x", mode=str(stat.S_IFREG | 0o640))
    world.later()
    assert stat.S_IMODE(walk(one)["f"].mode) == 0o640
    assert one.calls("head") == (0 if still else 1)


@promise("S-130", "S-28")
def test_an_own_change_is_shown_and_kept(world: World, one: Client) -> None:
    """What this mount did is newer than a listing that was made before."""
    fill(world)
    walk(one)
    one.local.chmod("f01", 0o666)
    one.local.write("f02", b"new")
    assert stat.S_IMODE(walk(one)["f01"].mode) == 0o666
    for _ in range(3):
        world.later()
        seen = walk(one)
        assert stat.S_IMODE(seen["f01"].mode) == 0o666
        assert (seen["f02"].size, stat.S_IMODE(seen["f02"].mode)) == (3, 0o600)
