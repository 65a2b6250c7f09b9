"""What names, links and special files promise (docs/SEMANTICS.md), over a bucket that stands for stricter servers."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from datastore.errors import InvalidKey
from datastore.fuse.ops import ROOT_INO
from datastore.fuse.store.base import Capabilities
from tests.driving import resolve
from tests.faulty import Fault
from tests.localfs import ME
from tests.mounted import Client, World, failing
from tests.promises import promise

ODD = ["\uf02f", "\uf02e", "\uf02e\uf02e"]
"""How empty, `.` and `..` segments are shown."""
NAMES = [
    *(b"plain", b"with space", b"\xff\xfe", b"\xe4\xf6\xfc (Latin-1)", "\u00e4\u6f22\U0001f600".encode()),
    *("\uf0ff".encode(), b"\x01\n\t\x7f", b"#?%&=+;:@,\\\"'<>|*", b".hidden", b"...", b"x.rclonelink"),
    *(b".rclonelink", b"a" * 255, b"\xed\xb2\x80"),
]


def crowd(world: World, client: Client) -> None:
    """Have names asked for one by one, among others that begin as they do."""
    world.put_all(["a!", "a0", "x.", "x.rclonelink2", "x0"], b"")
    client.ask_one_by_one()


def none_can_be_made(code: int, world: World, client: Client, name: str | bytes) -> None:
    """Whatever would make the name fails at once, and nothing stays behind."""
    before = world.all_keys()
    client.local.write("f", b"x")
    failing(code, client.local.open, name, os.O_CREAT | os.O_WRONLY)
    failing(code, client.local.write, name, b"")
    failing(code, client.local.mkdir, name)
    failing(code, client.local.symlink, b"t", name)
    failing(code, client.local.mknod, name, stat.S_IFIFO | 0o644)
    failing(code, client.local.rename, "f", name)
    assert world.all_keys() == sorted([*before, "f"])
    assert client.local.read("f") == b"x"
    client.nothing_left()


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


@promise("S-35", "S-36")
@pytest.mark.parametrize(
    ("code", "name"), [(errno.ENAMETOOLONG, "n" * 256), *[(errno.EINVAL, name) for name in (*ODD, "a\uf000")]]
)
def test_names_that_cannot_be_made(world: World, one: Client, code: int, name: str) -> None:
    """Over 255 bytes is ENAMETOOLONG for whatever would make it; those that are reserved are EINVAL."""
    none_can_be_made(code, world, one, name)


@promise("S-35")
def test_paths_whose_key_is_too_long(world: World, one: Client) -> None:
    """A key of 1,024 bytes is possible, of 1,025 is not."""
    directory = "/".join(["d" * 250] * 4)
    for depth in range(1, 5):
        one.local.mkdir("/".join(["d" * 250] * depth))
    room = 1024 - len(directory) - 1
    one.local.write(f"{directory}/{'f' * room}", b"x")
    assert one.local.read(f"{directory}/{'f' * room}") == b"x"
    failing(errno.ENAMETOOLONG, one.local.symlink, b"t", f"{directory}/{'g' * room}")
    none_can_be_made(errno.ENAMETOOLONG, world, one, f"{directory}/{'f' * (room + 1)}")


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


@promise("S-37")
@pytest.mark.parametrize("large", [False, True])
def test_an_object_beside_a_directory_has_another_name(world: World, one: Client, large: bool) -> None:
    """The directory has the name, the object is shown with U+F000 behind it; both work, and it gets its name back."""
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
    world.put("a", b"object")
    world.later()
    assert one.local.read("a\uf000") == b"object"
    world.tool.delete("a/b")
    world.later()
    assert one.local.read("a") == b"object"
    assert not one.local.exists("a\uf000")
    assert large or one.local.scandir() == [(b"a", stat.S_IFREG), (b"c", stat.S_IFREG)]


@promise("S-37")
@pytest.mark.parametrize("large", [False, True])
def test_the_object_has_the_name_beside_a_link_of_its_name(world: World, one: Client, large: bool) -> None:
    """The object has the name, the link's object is a file under its own, and stays one when it is renamed."""
    world.put("x", b"object")
    world.put("x.rclonelink", b"target")
    world.put("z", b"object")
    world.put("z.rclonelink", b"target")
    if large:
        crowd(world, one)
    else:
        shown = [b"x", b"x.rclonelink", b"z", b"z.rclonelink"]
        assert one.local.scandir() == [(name, stat.S_IFREG) for name in shown]
    assert one.local.read("x") == b"object"
    assert one.local.read("x.rclonelink") == b"target"
    one.local.rename("z.rclonelink", "y")
    assert world.all_keys()[-2:] == ["y", "z"]
    assert one.local.read("y") == b"target"
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
def test_a_file_that_ends_as_links_do(world: World, one: Client, other: Client) -> None:
    """Its dot is escaped, so that no tool takes it for a link."""
    one.local.write("x.rclonelink", b"bytes")
    assert world.all_keys() == ["x\uf02erclonelink"]
    assert other.local.listdir() == [b"x.rclonelink"]
    assert other.local.read("x.rclonelink") == b"bytes"
    one.local.rename("x.rclonelink", "y.rclonelink")
    assert world.all_keys() == ["y\uf02erclonelink"]


@promise("S-22")
@pytest.mark.parametrize("theirs", ["n", "n/", "n.rclonelink"])
def test_what_another_client_made_meanwhile_stays(world: World, one: Client, theirs: str) -> None:
    """The kernel takes the name for free: EEXIST, and the store has nothing else than before."""
    one.local.listdir()
    world.put(theirs)
    world.later()
    failing(errno.EEXIST, resolve, one.fs.mkdir(ME, ROOT_INO, b"n", 0o755))
    failing(errno.EEXIST, resolve, one.fs.symlink(ME, ROOT_INO, b"n", b"target"))
    assert world.all_keys() == [theirs]


@promise("S-23")
def test_the_name_of_the_hidden_directory_cannot_be_made(world: World, one: Client) -> None:
    failing(errno.EEXIST, one.local.mkdir, ".datastore.unlinked")
    assert world.all_keys() == []


@promise("S-38")
def test_a_server_that_refuses_a_long_name(world: World, one: Client) -> None:
    """ENAMETOOLONG for every way to make it."""
    world.bucket.longest_segment = 255
    none_can_be_made(errno.ENAMETOOLONG, world, one, b"\xff" * 100)
    assert one.local.listdir() == [b"f"]


@promise("S-38")
def test_a_server_that_keeps_files_of_its_own_under_a_name(world: World, one: Client) -> None:
    """EEXIST in any directory: it would be gone from the next listing. A link's key has a suffix."""
    world.bucket.capabilities = Capabilities(unlisted_segment=".own")
    one.local.mkdir("d")
    one.local.write("f", b"x")
    for name in (".own", "d/.own"):
        failing(errno.EEXIST, one.local.write, name, b"")
        failing(errno.EEXIST, one.local.mkdir, name)
        failing(errno.EEXIST, one.local.mknod, name, stat.S_IFIFO | 0o644)
        failing(errno.EEXIST, one.local.rename, "f", name)
        one.local.symlink(b"t", name)
    assert world.all_keys() == [".own.rclonelink", "d/", "d/.own.rclonelink", "f"]


@promise("S-38")
def test_a_server_that_keeps_no_file_beside_a_directory(world: World, one: Client, other: Client) -> None:
    """EEXIST, and the bytes that cannot be sent are kept and listed."""
    world.bucket.keeps_both = False
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


@promise("S-06", "S-08")
def test_a_listing_alone_shows_a_link_and_its_size(world: World) -> None:
    """No HEAD is needed to know a link; those of s3fs look like files with `attributes: listing`."""
    world.put("x.rclonelink", b"target")
    world.put("s", b"target", mode=str(stat.S_IFLNK | 0o777))
    client = world.client(attributes="listing")
    assert client.local.scandir() == [(b"s", stat.S_IFREG), (b"x", stat.S_IFLNK)]
    attr = client.local.stat("x")
    assert (attr.mode, attr.size) == (stat.S_IFLNK | 0o777, 6)
    assert client.local.stat("s").mode == stat.S_IFREG | 0o644
    assert client.calls("head") == 0
    assert client.local.readlink("x") == client.local.read("s") == b"target"


@promise("S-06", "S-10")
def test_links_that_are_refused(one: Client) -> None:
    """A target of more than 4,095 bytes; the target of a file; and hard links, since an object has one key."""
    failing(errno.ENAMETOOLONG, one.local.symlink, b"x" * 4096, "x")
    one.local.write("f", b"x")
    failing(errno.EINVAL, one.local.readlink, "f")
    failing(errno.EPERM, resolve, one.fs.link(ME, one.local.stat("f").ino, ROOT_INO, b"g"))


@promise("S-07", "S-08")
def test_links_of_other_tools(world: World, one: Client) -> None:
    """Rclone --links writes the target as body, without metadata; those of s3fs and geesefs are links when they are
    looked up, with full attributes."""
    world.put("d/x.rclonelink", b"../t")
    world.put("s", b"target", mode=str(stat.S_IFLNK | 0o777))
    world.put("g", b"", **{"--symlink-target": "a%20b%2Fc"})
    for path, target in (("d/x", b"../t"), ("s", b"target"), ("g", b"a b/c")):
        attr = one.local.stat(path)
        assert (stat.S_IFMT(attr.mode), attr.size) == (stat.S_IFLNK, len(target))
        assert one.local.readlink(path) == target
    one.local.rename("g", "h")
    assert one.local.readlink("h") == b"a b/c"


@promise("S-09")
def test_a_server_that_refuses_the_longer_name(world: World, one: Client, other: Client) -> None:
    """The link is then written as s3fs does, and read again; a rename writes no other form, it is ENAMETOOLONG."""
    world.bucket.longest_segment = 255
    name = "n" * 250
    one.local.symlink(b"target", name)
    assert world.all_keys() == [name]
    assert world.metadata(name)["mode"] == str(stat.S_IFLNK | 0o777)
    assert world.body(name) == b"target"
    world.later()
    for client in (one, other):
        assert stat.S_ISLNK(client.local.stat(name).mode)
        assert client.local.readlink(name) == b"target"
    one.local.symlink(b"target", "x")
    failing(errno.ENAMETOOLONG, one.local.rename, "x", "m" * 250)
    assert world.all_keys() == [name, "x.rclonelink"]
    assert one.local.readlink("x") == b"target"


@promise("S-10")
@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFBLK, stat.S_IFCHR])
def test_special_files_are_empty_objects(world: World, one: Client, other: Client, kind: int) -> None:
    """Their type is in the mode, a device's number beside it, where it stays whatever else changes."""
    number = os.makedev(7, 300) if kind in (stat.S_IFBLK, stat.S_IFCHR) else 0
    world.put("of-s3fs", mode=str(kind | 0o640))
    world.put("file", b"x", rdev="1281", mode=str(stat.S_IFREG | 0o644))
    one.local.mknod("d", kind | 0o640, number)
    assert world.body("d") == b""
    assert other.local.stat("d").mode == kind | 0o640
    one.local.chmod("d", 0o600)
    one.local.rename("d", "e")
    world.later()
    for client in (one, other, one.again()):
        seen = client.local.stat("e")
        assert (seen.mode, seen.rdev) == (kind | 0o600, number)
        assert (b"e", kind) in client.local.scandir()
    seen = other.local.stat("of-s3fs")
    assert (seen.mode, seen.rdev, other.local.stat("file").rdev) == (kind | 0o640, 0, 0)
    other.local.chmod("file", 0o600)
    assert world.metadata("file")["rdev"] == "1281"
