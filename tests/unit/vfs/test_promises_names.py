"""What names promise (docs/SEMANTICS.md), over a bucket in memory that also stands for stricter servers."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from datastore.errors import InvalidKey
from datastore.fuse.store.base import Capabilities
from tests.faulty import Fault
from tests.mounted import Client, World, failing
from tests.promises import promise

ODD = ["\uf02f", "\uf02e", "\uf02e\uf02e"]
"""How empty, `.` and `..` segments are shown."""
NAMES = [
    b"plain",
    b"with space",
    b"\xff\xfe",
    b"\xe4\xf6\xfc (Latin-1)",
    "\u00e4\u6f22\U0001f600".encode(),
    "\uf0ff".encode(),
    b"\x01\n\t\x7f",
    b"#?%&=+;:@,\\\"'<>|*",
    b".hidden",
    b"...",
    b"x.rclonelink",
    b".rclonelink",
    b"a" * 255,
    b"\xed\xb2\x80",
]


def crowd(world: World, client: Client) -> None:
    """Have names asked for one by one, among others that begin as they do."""
    for other in ("a!", "a0", "x.", "x.rclonelink2", "x0"):
        world.put(other)
    client.ask_one_by_one()


@promise("S-34")
@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_any_bytes_are_a_name(world: World, one: Client, other: Client, name: bytes) -> None:
    """A file, a directory and a link of any name come back as they were, for every client."""
    one.local.mkdir(name)
    one.local.write(name + b"/" + name, b"x")
    for client in (one, other):
        assert client.local.scandir() == [(name, stat.S_IFDIR)]
        assert client.local.scandir(name) == [(name, stat.S_IFREG)]
        assert client.local.read(name + b"/" + name) == b"x"
    one.local.unlink(name + b"/" + name)
    one.local.symlink(b"t", name + b"/" + name)
    world.later()
    for client in (one, other):
        assert client.local.scandir(name) == [(name, stat.S_IFLNK)]
        assert client.local.readlink(name + b"/" + name) == b"t"
    one.local.rename(name + b"/" + name, name + b"/b")
    one.local.rename(name + b"/b", name + b"/" + name)
    one.local.unlink(name + b"/" + name)
    one.local.rmdir(name)
    assert world.all_keys() == []


@promise("S-34")
def test_how_bytes_that_are_not_utf8_are_kept(world: World, one: Client) -> None:
    """Each becomes U+F000 + byte; real characters of that range are escaped the same way."""
    one.local.write(b"a\xff", b"")
    one.local.write("\uf0ff", b"")
    assert world.all_keys() == ["a\uf0ff", "\uf0ef\uf083\uf0bf"]
    assert one.local.listdir() == [b"a\xff", "\uf0ff".encode()]


@promise("S-35")
def test_names_that_are_too_long(world: World, one: Client) -> None:
    """Over 255 bytes is ENAMETOOLONG for whatever would make it."""
    name = "n" * 256
    one.local.write("f", b"")
    failing(errno.ENAMETOOLONG, one.local.write, name, b"")
    failing(errno.ENAMETOOLONG, one.local.mkdir, name)
    failing(errno.ENAMETOOLONG, one.local.symlink, b"t", name)
    failing(errno.ENAMETOOLONG, one.local.mknod, name, stat.S_IFIFO)
    failing(errno.ENAMETOOLONG, one.local.rename, "f", name)
    assert world.all_keys() == ["f"]


@promise("S-35")
def test_paths_whose_key_is_too_long(world: World, one: Client) -> None:
    """A key of 1,024 bytes is possible, of 1,025 is not."""
    directory = "/".join(["d" * 250] * 4)
    for depth in range(1, 5):
        one.local.mkdir("/".join(["d" * 250] * depth))
    room = 1024 - len(directory) - 1
    one.local.write(f"{directory}/{'f' * room}", b"x")
    assert one.local.read(f"{directory}/{'f' * room}") == b"x"
    one.local.write("f", b"")
    name = f"{directory}/{'f' * (room + 1)}"
    failing(errno.ENAMETOOLONG, one.local.write, name, b"")
    failing(errno.ENAMETOOLONG, one.local.mkdir, f"{directory}/{'f' * room}2")
    failing(errno.ENAMETOOLONG, one.local.symlink, b"t", f"{directory}/{'g' * room}")
    failing(errno.ENAMETOOLONG, one.local.rename, "f", name)


@promise("S-35")
def test_longer_names_of_other_tools_are_shown(world: World, one: Client) -> None:
    """They are listed, and what can be done with them is done."""
    world.put("n" * 300, b"x")
    assert one.local.listdir() == [b"n" * 300]
    assert one.local.read("n" * 300) == b"x"
    one.local.rename("n" * 300, "short")
    assert world.all_keys() == ["short"]


@promise("S-36")
@pytest.mark.parametrize(("segment", "shown"), list(zip(["", ".", ".."], ODD, strict=True)))
def test_segments_that_no_name_can_spell(world: World, one: Client, segment: str, shown: str) -> None:
    """They are shown as directories of reserved names, and below them everything works."""
    world.put(f"a/{segment}/b", b"x")
    world.put(f"{segment}/b", b"y")
    assert one.local.listdir("a") == [shown.encode()]
    assert one.local.listdir() == sorted([b"a", shown.encode()])
    assert one.local.read(f"a/{shown}/b") == b"x"
    assert one.local.read(f"{shown}/b") == b"y"
    one.local.write(f"a/{shown}/c", b"z")
    one.local.mkdir(f"a/{shown}/d")
    one.local.rename(f"a/{shown}/b", f"a/{shown}/d/b")
    one.local.unlink(f"a/{shown}/c")
    assert f"a/{segment}/d/b" in world.all_keys()
    one.local.rename(f"a/{shown}", "a/plain")
    assert one.local.read("a/plain/d/b") == b"x"
    assert not [key for key in world.all_keys() if key.startswith(f"a/{segment}/")]


@promise("S-36")
@pytest.mark.parametrize("shown", [*ODD, "a\uf000"])
def test_reserved_names_cannot_be_made(world: World, one: Client, shown: str) -> None:
    """EINVAL."""
    one.local.write("f", b"")
    failing(errno.EINVAL, one.local.write, shown, b"")
    failing(errno.EINVAL, one.local.mkdir, shown)
    failing(errno.EINVAL, one.local.symlink, b"t", shown)
    failing(errno.EINVAL, one.local.rename, "f", shown)
    assert world.all_keys() == ["f"]


@promise("S-37")
@pytest.mark.parametrize("large", [False, True])
def test_an_object_beside_a_directory(world: World, one: Client, large: bool) -> None:
    """The directory has the name, the object is shown with U+F000 behind it; both work."""
    world.put("a", b"object")
    world.put("a/b", b"below")
    if large:
        crowd(world, one)
    else:
        assert one.local.scandir() == [(b"a", stat.S_IFDIR), ("a\uf000".encode(), stat.S_IFREG)]
    assert one.local.read("a/b") == b"below"
    assert one.local.read("a\uf000") == b"object"
    one.local.write("a\uf000", b"changed")
    assert world.body("a") == b"changed"
    one.local.rename("a\uf000", "c")
    assert (world.body("c"), world.body("a/b")) == (b"changed", b"below")
    world.later()
    assert not one.local.exists("a\uf000")


@promise("S-37")
def test_the_object_gets_its_name_back(world: World, one: Client) -> None:
    """When the directory beside it goes."""
    world.put("a", b"object")
    world.put("a/b", b"below")
    assert one.local.read("a\uf000") == b"object"
    world.tool.delete("a/b")
    world.later()
    assert one.local.scandir() == [(b"a", stat.S_IFREG)]
    assert one.local.read("a") == b"object"
    assert not one.local.exists("a\uf000")


@promise("S-37")
@pytest.mark.parametrize("large", [False, True])
def test_an_object_beside_a_link_of_its_name(world: World, one: Client, large: bool) -> None:
    """The object has the name, the link's object is a file under its own."""
    world.put("x", b"object")
    world.put("x.rclonelink", b"target")
    if large:
        crowd(world, one)
    else:
        assert one.local.scandir() == [(b"x", stat.S_IFREG), (b"x.rclonelink", stat.S_IFREG)]
    assert one.local.read("x") == b"object"
    assert one.local.read("x.rclonelink") == b"target"
    one.local.unlink("x")
    world.later()
    assert one.local.readlink("x") == b"target"
    assert not one.local.exists("x.rclonelink")


@promise("S-29", "S-37")
def test_a_link_named_as_a_links_key_comes_back(world: World, one: Client) -> None:
    """When the directory beside it goes, also where its own key has an escaped dot."""
    one.local.symlink(b"target", "x.rclonelink")
    world.put("x.rclonelink/")
    world.later()
    assert (b"x.rclonelink", stat.S_IFDIR) in one.local.scandir()
    one.local.rmdir("x.rclonelink")
    world.clock.advance(0.01)
    assert one.local.scandir() == [(b"x.rclonelink", stat.S_IFLNK)]


@promise("S-37")
def test_the_file_beside_is_renamed_as_a_file(world: World, one: Client) -> None:
    """What is shown as a file does not become a link by a rename."""
    world.put("x", b"object")
    world.put("x.rclonelink", b"target")
    one.local.rename("x.rclonelink", "y")
    assert world.all_keys() == ["x", "y"]
    assert one.local.read("y") == b"target"


@promise("S-37")
def test_a_file_that_ends_as_links_do(world: World, one: Client, other: Client) -> None:
    """Its dot is escaped, so that no tool takes it for a link."""
    one.local.write("x.rclonelink", b"bytes")
    assert world.all_keys() == ["x\uf02erclonelink"]
    assert other.local.listdir() == [b"x.rclonelink"]
    assert other.local.read("x.rclonelink") == b"bytes"
    one.local.rename("x.rclonelink", "y.rclonelink")
    assert world.all_keys() == ["y\uf02erclonelink"]


# -- S-38


@promise("S-38")
def test_a_server_that_refuses_a_long_name(world: World, one: Client) -> None:
    """ENAMETOOLONG for every way to make it, at once, and nothing stays behind."""
    world.bucket.capabilities = Capabilities(max_key_segment_bytes=255)
    name = b"\xff" * 100
    one.local.write("f", b"x")
    failing(errno.ENAMETOOLONG, one.local.mkdir, name)
    failing(errno.ENAMETOOLONG, one.local.symlink, b"t", name)
    failing(errno.ENAMETOOLONG, one.local.mknod, name, stat.S_IFREG | 0o644)
    failing(errno.ENAMETOOLONG, one.local.rename, "f", name)
    failing(errno.ENAMETOOLONG, one.local.open, name, os.O_CREAT | os.O_WRONLY)
    assert world.all_keys() == ["f"]
    assert one.local.listdir() == [b"f"]
    assert one.local.read("f") == b"x"
    assert one.fs.uploads.unsent() == []


@promise("S-38")
def test_a_server_that_keeps_no_file_beside_a_directory(world: World, one: Client, other: Client) -> None:
    """EEXIST, and the bytes that cannot be sent are kept and listed."""
    world.bucket.capabilities = Capabilities(file_beside_directory=False)
    one.local.listdir()
    file = one.local.open("a", os.O_CREAT | os.O_WRONLY)
    file.write(b"bytes")
    other.local.mkdir("a")
    other.local.write("a/b", b"below")
    failing(errno.EEXIST, file.close)
    assert world.all_keys() == ["a/", "a/b"]
    assert [row["path"] for row in one.fs.uploads.unsent()] == ["a"]


@promise("S-38")
def test_a_server_that_refuses_odd_segments(world: World, one: Client) -> None:
    """EINVAL, and other names are not harmed."""
    one.local.mkdir("d")
    one.faulty.plan = lambda index, method: Fault(InvalidKey("XMinioInvalidObjectName")) if method == "put" else None
    failing(errno.EINVAL, one.local.mkdir, "d/e")
    failing(errno.EINVAL, one.local.open, "d/f", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert one.local.listdir("d") == []
