"""What links and special files promise (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from datastore.fuse.ops import ROOT_INO, FSError
from datastore.fuse.store.base import Capabilities
from tests.driving import resolve
from tests.localfs import ME
from tests.mounted import Client, World, failing
from tests.promises import promise

TARGETS = [b"f", b"../a b/\xff\xfe", b"/nowhere", b"x" * 4095]


@promise("S-06")
@pytest.mark.parametrize("target", TARGETS, ids=["plain", "not UTF-8", "dangling", "longest"])
def test_a_link_is_an_object_with_its_target_as_body(world: World, one: Client, other: Client, target: bytes) -> None:
    """`x` is the object `x.rclonelink`; other mounts and later ones read it."""
    one.local.symlink(target, "x")
    assert world.all_keys() == ["x.rclonelink"]
    assert world.body("x.rclonelink") == target
    for client in (one, other, one.again()):
        attr = client.local.stat("x")
        assert (attr.mode, attr.size) == (stat.S_IFLNK | 0o777, len(target))
        assert client.local.readlink("x") == target


@promise("S-06")
def test_a_listing_alone_shows_a_link_and_its_size(world: World) -> None:
    """No HEAD is needed to know a link."""
    world.put("x.rclonelink", b"target")
    client = world.client(attributes="listing")
    assert client.local.scandir() == [(b"x", stat.S_IFLNK)]
    attr = client.local.stat("x")
    assert (attr.mode, attr.size) == (stat.S_IFLNK | 0o777, 6)
    assert client.calls("head") == 0
    assert client.local.readlink("x") == b"target"


@promise("S-06")
def test_a_target_that_is_too_long(one: Client) -> None:
    """Over 4,095 bytes is ENAMETOOLONG."""
    failing(errno.ENAMETOOLONG, one.local.symlink, b"x" * 4096, "x")


@promise("S-06")
def test_readlink_of_a_file(one: Client) -> None:
    """Only links have targets."""
    one.local.write("f", b"x")
    failing(errno.EINVAL, one.local.readlink, "f")


@promise("S-06")
def test_a_link_can_be_removed_and_renamed(world: World, one: Client) -> None:
    """A link is one name: it moves and goes with its object."""
    one.local.symlink(b"t", "x")
    one.local.rename("x", "y")
    assert world.all_keys() == ["y.rclonelink"]
    assert one.local.readlink("y") == b"t"
    one.local.unlink("y")
    assert world.all_keys() == []


@promise("S-07")
def test_a_link_of_rclone_is_read(world: World, one: Client) -> None:
    """Rclone --links writes the target as body, without metadata of ours."""
    world.put("d/x.rclonelink", b"../t")
    assert one.local.readlink("d/x") == b"../t"
    assert stat.S_ISLNK(one.local.stat("d/x").mode)


@promise("S-08")
def test_links_of_s3fs_and_geesefs(world: World, one: Client) -> None:
    """With full attributes, links in the forms of s3fs and geesefs are links when they are looked up."""
    world.put("s", b"target", mode=str(stat.S_IFLNK | 0o777))
    world.put("g", b"", **{"--symlink-target": "a%20b%2Fc"})
    for path, target in (("s", b"target"), ("g", b"a b/c")):
        attr = one.local.stat(path)
        assert stat.S_ISLNK(attr.mode)
        assert attr.size == len(target)
        assert one.local.readlink(path) == target
    one.local.rename("g", "h")
    assert one.local.readlink("h") == b"a b/c"


@promise("S-08")
def test_links_of_s3fs_are_files_in_a_listing(world: World) -> None:
    """With `attributes: listing` they look like files."""
    world.put("s", b"target", mode=str(stat.S_IFLNK | 0o777))
    client = world.client(attributes="listing")
    assert client.local.stat("s").mode == stat.S_IFREG | 0o644
    assert client.local.read("s") == b"target"


@promise("S-09")
def test_a_server_that_refuses_the_longer_name(world: World, one: Client, other: Client) -> None:
    """The link is then written as s3fs does, and read again."""
    world.bucket.capabilities = Capabilities(max_key_segment_bytes=255)
    name = "n" * 250
    one.local.symlink(b"target", name)
    assert world.all_keys() == [name]
    assert world.metadata(name)["mode"] == str(stat.S_IFLNK | 0o777)
    assert world.body(name) == b"target"
    world.later()
    for client in (one, other):
        assert stat.S_ISLNK(client.local.stat(name).mode)
        assert client.local.readlink(name) == b"target"


@promise("S-09")
def test_a_link_keeps_its_name_when_the_new_one_is_refused(world: World, one: Client) -> None:
    """A rename writes no other form: it is ENAMETOOLONG where the server refuses the longer name."""
    world.bucket.capabilities = Capabilities(max_key_segment_bytes=255)
    one.local.symlink(b"target", "x")
    failing(errno.ENAMETOOLONG, one.local.rename, "x", "n" * 250)
    assert world.all_keys() == ["x.rclonelink"]
    assert one.local.readlink("x") == b"target"


@promise("S-10")
@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_fifos_and_sockets_are_empty_objects(world: World, one: Client, other: Client, kind: int) -> None:
    """Their type is in the mode."""
    one.local.mknod("p", kind | 0o640)
    assert world.body("p") == b""
    for client in (one, other, one.again()):
        assert client.local.stat("p").mode == kind | 0o640


@promise("S-10")
@pytest.mark.parametrize("kind", [stat.S_IFBLK, stat.S_IFCHR])
def test_devices_are_empty_objects(world: World, one: Client, other: Client, kind: int) -> None:
    """Their type is in the mode, their number beside it, where it stays whatever else changes."""
    world.put("of-s3fs", mode=str(kind | 0o640))
    world.put("file", b"x", rdev="1281", mode=str(stat.S_IFREG | 0o644))
    one.local.mknod("d", kind | 0o640, os.makedev(7, 300))
    assert world.body("d") == b""
    one.local.chmod("d", 0o600)
    one.local.rename("d", "e")
    for client in (one, other, one.again()):
        seen = client.local.stat("e")
        assert (seen.mode, seen.rdev) == (kind | 0o600, os.makedev(7, 300))
    assert other.local.stat("of-s3fs").mode == kind | 0o640
    assert other.local.stat("of-s3fs").rdev == 0
    assert other.local.stat("file").rdev == 0
    other.local.chmod("file", 0o600)
    assert world.metadata("file")["rdev"] == "1281"


@promise("S-10")
def test_hard_links_are_refused(one: Client) -> None:
    """EOPNOTSUPP: an object has one key."""
    one.local.write("f", b"x")
    with pytest.raises(FSError) as caught:
        resolve(one.fs.link(ME, one.local.stat("f").ino, ROOT_INO, b"g"))
    assert caught.value.errno == errno.EOPNOTSUPP
