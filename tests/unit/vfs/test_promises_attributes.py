"""What attributes promise (docs/SEMANTICS.md), over a bucket in memory with two clients."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from datastore.errors import AccessDenied
from datastore.fuse.ops import NOW, ROOT_INO, Caller, Fh, OpenRequest, SetAttr
from datastore.fuse.store.base import ObjectInfo, WriteOptions
from datastore.fuse.store.limits import MAX_METADATA_BYTES
from datastore.fuse.vfs.lookup.remote import Remote
from tests.clock import EPOCH_NS
from tests.driving import resolve, the_loop
from tests.faulty import Fault, no_faults
from tests.kernelkeeps import Kept, OpenDirectory
from tests.localfs import LocalFs
from tests.mounted import Client, World, failing, fails
from tests.promises import promise

THEN_NS = 1_234_567_890_123_456_789


def metadata_size(metadata: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in metadata.items())


@promise("S-11")
def test_attributes_are_written_in_the_form_of_s3fs(world: World, one: Client) -> None:
    """Each attribute is user metadata under s3fs's name; UTIME_NOW is the file system's time."""
    one.local.write("f", b"x")
    one.local.setattr("f", SetAttr(mode=0o100640, uid=7, gid=8, atime_ns=THEN_NS, mtime_ns=THEN_NS + 1))
    assert world.metadata("f") == {
        "mode": str(stat.S_IFREG | 0o640),
        "uid": "7",
        "gid": "8",
        "atime": "1234567890.123456789",
        "mtime": "1234567890.123456790",
        "ctime": f"{EPOCH_NS // 10**9}.000000000",
    }
    world.later()
    attr = one.local.setattr("f", SetAttr(mtime_ns=NOW))
    assert attr.mtime_ns == attr.ctime_ns == world.clock.time_ns()


MAKE: dict[str, Callable[[LocalFs], None]] = {
    "file": lambda local: local.write("n", b"x"),
    "directory": lambda local: local.mkdir("n"),
    "link": lambda local: local.symlink(b"t", "n"),
    "fifo": lambda local: local.mknod("n", stat.S_IFIFO | 0o600),
}


@promise("S-11")
@pytest.mark.parametrize("kind", MAKE)
def test_attributes_survive_a_remount_and_reach_others(world: World, one: Client, other: Client, kind: str) -> None:
    """They are the object's, not the mount's; also a directory's times hold, as `cp -p` and tar need."""
    MAKE[kind](one.local)
    made = one.local.setattr("n", SetAttr(mode=0o751, uid=7, gid=8, atime_ns=THEN_NS, mtime_ns=THEN_NS + 1))
    world.later()
    for client in (one, other, one.again()):
        attr = client.local.stat("n")
        assert attr._replace(nlink=made.nlink) == made
        assert (stat.S_IMODE(attr.mode), attr.uid, attr.gid) == (0o751, 7, 8)
        assert (attr.atime_ns, attr.mtime_ns) == (THEN_NS, THEN_NS + 1)


@promise("S-11")
def test_what_s3fs_wrote_is_shown(world: World, one: Client) -> None:
    """S3fs and we agree."""
    world.put("f", b"abc", mode="33152", uid="5", gid="6", mtime="1234567890.5", atime="1234567891", ctime="1234567892")
    attr = one.local.stat("f")
    assert (attr.mode, attr.uid, attr.gid, attr.size) == (stat.S_IFREG | 0o600, 5, 6, 3)
    times = [ns - 1_234_567_890 * 10**9 for ns in (attr.mtime_ns, attr.atime_ns, attr.ctime_ns)]
    assert times == [5 * 10**8, 10**9, 2 * 10**9]


@promise("S-11")
@pytest.mark.parametrize("change", ["chmod", "write", "rename", "xattr"])
def test_metadata_and_content_type_of_other_tools_are_kept(world: World, one: Client, change: str) -> None:
    """What is not ours stays when ours changes."""
    world.tool.put("f", b"abc", WriteOptions(metadata={"origin": "camera"}, content_type="image/png"))
    {
        "chmod": lambda: one.local.chmod("f", 0o600),
        "write": lambda: one.local.write("f", b"new"),
        "rename": lambda: one.local.rename("f", "g"),
        "xattr": lambda: one.local.setxattr("f", b"user.a", b"b"),
    }[change]()
    info = world.tool.head("g" if change == "rename" else "f")
    assert (info.metadata["origin"], info.content_type) == ("camera", "image/png")


@promise("S-11")
def test_times_of_a_directory_move_with_its_entries(world: World, one: Client) -> None:
    """While the mount lasts, and without a request for each."""
    one.local.mkdir("d")
    before = one.local.stat("d").mtime_ns
    steps: tuple[Callable[[], None], ...] = (
        lambda: one.local.write("d/f", b""),
        lambda: one.local.rename("d/f", "d/g"),
        lambda: one.local.unlink("d/g"),
    )
    for step in steps:
        world.later()
        written = one.calls("put")
        step()
        after = one.local.stat("d").mtime_ns
        assert after == world.clock.time_ns() > before
        assert one.calls("put") - written <= 1
        before = after
    world.later()
    assert one.local.stat("d").mtime_ns == before


@promise("S-11")
def test_attributes_of_the_mounts_own_directory(world: World) -> None:
    """With a prefix the root has a marker as well, and its attributes survive."""
    client = world.client(prefix="data/")
    resolve(client.fs.setattr(Caller(0, 0, 1), ROOT_INO, Fh(0), SetAttr(mode=0o700, uid=9)))
    assert world.metadata("data/")["mode"] == str(stat.S_IFDIR | 0o700)
    attr = client.again().local.stat("")
    assert (attr.mode, attr.uid) == (stat.S_IFDIR | 0o700, 9)


@promise("S-11")
def test_attributes_of_a_whole_buckets_root(world: World, one: Client) -> None:
    """A bucket's root has no key: its attributes last as long as the mount, and no request names an empty key."""
    heads: list[str] = []
    head = one.faulty.inner.head
    one.faulty.inner.head = lambda key: heads.append(key) or head(key)  # type: ignore[method-assign,func-returns-value]
    one.local.listxattr("")
    attr = resolve(one.fs.setattr(Caller(0, 0, 1), ROOT_INO, Fh(0), SetAttr(mode=0o700))).attr
    world.later()
    assert one.local.stat("") == attr
    assert one.local.stat("").mode == stat.S_IFDIR | 0o700
    assert heads == []
    assert world.all_keys() == []


@promise("S-12")
def test_each_version_of_an_object_costs_one_head(world: World, one: Client) -> None:
    """An answer is asked for once per version of an object."""
    for heads, mode in ((1, 0o600), (2, 0o640)):
        world.put("f", b"%d" % heads, mode=str(stat.S_IFREG | mode))
        world.later(3)
        for _ in range(5):
            assert stat.S_IMODE(one.local.stat("f").mode) == mode
            world.later()
        assert one.calls("head") == heads


@promise("S-12")
def test_answers_are_remembered_on_disk(world: World, one: Client) -> None:
    """The next mount does not ask again."""
    names = [f"f{number}" for number in range(10)]
    for name in names:
        world.put(name, b"x", mode=str(stat.S_IFREG | 0o600))
    world.later()
    one.local.scandir(plus=True)
    assert one.calls("head") == 10
    one.unmount()
    again = one.again()
    assert all(stat.S_IMODE(again.local.stat(name).mode) == 0o600 for name in names)
    again.local.scandir(plus=True)
    assert again.calls("head") == 0


@promise("S-12")
def test_an_answer_within_the_second_of_the_change_is_asked_for_again(world: World, one: Client) -> None:
    """A second change of metadata in the same second leaves etag and time as they were; it is seen."""
    world.put("f", b"x", mode=str(stat.S_IFREG | 0o600))
    assert stat.S_IMODE(one.local.stat("f").mode) == 0o600
    world.clock.advance(0.4)
    world.put("f", b"x", mode=str(stat.S_IFREG | 0o644))
    world.later()
    assert stat.S_IMODE(one.local.stat("f").mode) == 0o644


@promise("S-12")
def test_attributes_that_were_changed_here_are_not_those_that_were_remembered(world: World, one: Client) -> None:
    """Versitygw keeps the ETag and the time of an object whose metadata changes."""
    world.put("f", b"x", mode=str(stat.S_IFREG | 0o644))
    world.clock.advance(3)
    assert stat.S_IMODE(one.local.stat("f").mode) == 0o644
    world.clock.advance(-3)
    one.local.chmod("f", 0o600)
    world.clock.advance(3)
    one.unmount()
    assert stat.S_IMODE(one.again().local.stat("f").mode) == 0o600


@promise("S-12", "S-150")
@pytest.mark.parametrize(("is_far", "width"), [(False, 8), (True, 64)])
def test_a_walk_asks_for_many_at_once(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, is_far: bool, width: int
) -> None:
    """Of a distant store for as many as there are connections."""
    monkeypatch.setattr(Remote, "is_far", is_far)
    real, under_way, most = one.faulty.head, 0, 0

    async def counted(key: str) -> ObjectInfo:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await the_loop().sleep(0.001)
        under_way -= 1
        return await real(key)

    monkeypatch.setattr(one.faulty, "head", counted)
    for number in range(100):
        world.put(f"f{number:02}", b"%d" % number)
    assert len(one.local.scandir(plus=True)) == 100
    assert one.calls("head") == 100
    assert most == width


@promise("S-150")
def test_what_many_heads_find_is_what_each_would(world: World, one: Client) -> None:
    """What is gone is not shown, what another client wrote is, and what is open keeps its version."""
    for number in range(20):
        world.put(f"f{number:02}", b"old", mode=str(stat.S_IFREG | 0o600))
    names = one.local.listdir()
    file = one.local.open("f03", os.O_RDONLY)
    assert file.read() == b"old"
    del world.bucket.objects[b"f01"]
    world.bucket.sorted_keys.remove(b"f01")
    for name in ("f02", "f03"):
        world.put(name, b"a newer one", mode=str(stat.S_IFREG | 0o640))

    one.local.scandir(plus=True)

    assert names == [b"f%02d" % number for number in range(20)]
    assert stat.S_IMODE(one.local.stat("f02").mode) == 0o640
    assert one.local.stat("f02").size == 11
    assert file.read() == b"old"
    world.later()
    assert fails(errno.ENOENT, one.local.stat, "f01")
    assert one.local.read("f03") == b"a newer one"


@promise("S-150")
def test_after_one_refusal_among_many_heads_no_more_are_sent(world: World, one: Client) -> None:
    """What was told until then is known."""
    world.put_all(f"f{number:02}" for number in range(20))
    world.later()
    refused, heads = Fault(AccessDenied("no")), count()
    one.faulty.plan = lambda _, method: refused if method == "head" and next(heads) == 5 else None
    failing(errno.EACCES, partial(one.local.scandir, plus=True))
    assert one.calls("head") < 20
    one.faulty.plan = no_faults
    one.local.scandir(plus=True)
    assert one.calls("head") == 21


@promise("S-12")
def test_a_walk_that_takes_long_is_told_attributes_to_its_end(world: World, one: Client) -> None:
    """Those of directories that were known and are too old by then are asked for again by the walk itself."""
    world.put_all(f"d{number:02}/x" for number in range(20))
    reading = OpenDirectory(one.fs, ROOT_INO, Kept())
    for _ in range(2):
        reading.read(4)
    world.later()
    lines = reading.read(100)
    assert len(lines) == 20 + 2 - 2 * 4
    assert all(line.entry is not None and line.entry.attr_ttl_s for line in lines)


@promise("S-13")
def test_listing_sends_no_head(world: World) -> None:
    """Stat is answered by the listing alone: default mode, the mount's owner, LastModified.

    Also as fstat(2) of a directory, or of a file, that was opened long ago.
    """
    world.put("d/f", b"abc", mode=str(stat.S_IFREG | 0o600), uid="5")
    client = world.client(attributes="listing")
    world.later()
    owner = client.fs.core.settings.defaults
    inos = [client.local.stat(path).ino for path in ("d", "d/f")]
    for _ in range(3):
        modes = [resolve(client.fs.getattr(ino, Fh(0))).attr.mode for ino in inos]
        assert modes == [stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644]
        assert client.local.stat("d").mode == stat.S_IFDIR | 0o755
        attr = client.local.stat("d/f")
        assert (attr.mode, attr.uid, attr.gid) == (stat.S_IFREG | 0o644, owner.uid, owner.gid)
        assert attr.mtime_ns == EPOCH_NS
        client.local.scandir("d", plus=True)
        world.later()
    assert client.local.read("d/f") == b"abc"
    assert client.calls("head") == 0


@promise("S-13")
def test_listing_writes_attributes_all_the_same(world: World, other: Client) -> None:
    """A change on such a mount is the object's, and another mount with `full` sees it; nothing else is lost."""
    world.put("f", b"abc", uid="5", mode=str(stat.S_IFREG | 0o600), origin="camera")
    client = world.client(attributes="listing")
    client.local.chmod("f", 0o640)
    attr = other.local.stat("f")
    assert (stat.S_IMODE(attr.mode), attr.uid) == (0o640, 5)
    assert world.metadata("f")["origin"] == "camera"
    with client.local.opened("f", os.O_RDWR) as file:
        file.write(b"X", 1)
    assert world.body("f") == b"aXc"
    assert world.metadata("f")["uid"] == "5"


@promise("S-14")
@pytest.mark.parametrize("path", ["f", "d"])
def test_extended_attributes(world: World, one: Client, other: Client, path: str) -> None:
    """User.* is kept in the metadata as s3fs keeps it."""
    one.local.write("f", b"x")
    one.local.mkdir("d")
    one.local.setxattr(path, b"user.\xff", b"\x00\xff")
    one.local.setxattr(path, b"user.b", b"")
    one.local.setxattr(path, b"user.a", b"a")
    assert one.local.getxattr(path, b"user.\xff") == b"\x00\xff"
    for client in (other, one.again()):
        assert sorted(client.local.listxattr(path)) == [b"user.a", b"user.b", b"user.\xff"]
        assert client.local.getxattr(path, b"user.\xff") == b"\x00\xff"
    other.local.removexattr(path, b"user.b")
    assert sorted(other.local.listxattr(path)) == [b"user.a", b"user.\xff"]
    ino = other.local.stat(path).ino
    assert len(resolve(other.again(resumed=True).fs.listxattr(ino))) == 2
    assert resolve(other.again(resumed=True).fs.getxattr(ino, b"user.a")) == b"a"
    failing(errno.ENODATA, other.local.getxattr, path, b"user.b")
    failing(errno.ENODATA, other.local.removexattr, path, b"user.b")


@promise("S-14", "S-161")
@pytest.mark.parametrize("change", ["setxattr", "removexattr", "chmod"])
def test_a_change_keeps_what_another_client_has_just_set(world: World, one: Client, other: Client, change: str) -> None:
    """All attributes are written together: a change begins with those that the store has now."""
    other.local.write("f", b"x")
    other.local.setxattr("f", b"user.a", b"a")
    world.later()
    assert one.local.listxattr("f") == [b"user.a"]
    other.local.setxattr("f", b"user.theirs", b"theirs")
    if change == "setxattr":
        one.local.setxattr("f", b"user.ours", b"ours")
    elif change == "removexattr":
        one.local.removexattr("f", b"user.a")
    else:
        one.local.chmod("f", 0o600)
    assert world.client().local.getxattr("f", b"user.theirs") == b"theirs"


@promise("S-14")
def test_what_s3fs_keeps_as_extended_attributes(world: World, one: Client) -> None:
    """Percent-encoded JSON of base64."""
    world.put("f", b"", xattr="%7B%22user.a%22%3A%22Yg%3D%3D%22%7D")
    assert one.local.getxattr("f", b"user.a") == b"b"
    one.local.setxattr("f", b"user.c", b"d")
    assert world.metadata("f")["xattr"] == "%7B%22user.a%22%3A%22Yg%3D%3D%22%2C%22user.c%22%3A%22ZA%3D%3D%22%7D"


@promise("S-14")
def test_extended_attributes_that_are_refused(world: World, one: Client) -> None:
    """XATTR_CREATE and XATTR_REPLACE; over 2 KiB in all is ENOSPC, and what was there stays; other namespaces are
    EOPNOTSUPP, and so is everything with `attributes: listing`."""
    one.local.write("f", b"x")
    failing(errno.ENODATA, one.local.setxattr, "f", b"user.a", b"1", 2)
    one.local.setxattr("f", b"user.a", b"1", 1)
    failing(errno.EEXIST, one.local.setxattr, "f", b"user.a", b"2", 1)
    one.local.setxattr("f", b"user.a", b"3" * 1000, 2)
    failing(errno.ENOSPC, one.local.setxattr, "f", b"user.b", b"2" * 1000)
    for name in (b"security.selinux", b"trusted.a", b"system.posix_acl_access"):
        failing(errno.EOPNOTSUPP, one.local.setxattr, "f", name, b"")
        failing(errno.EOPNOTSUPP, one.local.getxattr, "f", name)
        failing(errno.EOPNOTSUPP, one.local.removexattr, "f", name)
    assert one.local.listxattr("f") == [b"user.a"]
    assert one.local.getxattr("f", b"user.a") == b"3" * 1000
    assert world.body("f") == b"x"
    listing = world.client(attributes="listing").local
    failing(errno.EOPNOTSUPP, listing.setxattr, "f", b"user.a", b"")
    failing(errno.EOPNOTSUPP, listing.getxattr, "f", b"user.a")


@promise("S-14")
def test_two_kib_of_metadata_and_no_byte_more(world: World, one: Client) -> None:
    """Also of a file that is not sent yet: its close would fail."""
    one.local.write("f", b"x")
    one.local.setxattr("f", b"user.", b"1" * 999)
    name = b"user." + b"n" * (MAX_METADATA_BYTES - metadata_size(world.metadata("f")))
    one.local.removexattr("f", b"user.")
    with one.local.opened("f", os.O_WRONLY) as file:
        file.write(b"X")
        failing(errno.ENOSPC, one.local.setxattr, "f", name + b"n", b"1" * 999)
    one.local.setxattr("f", name, b"1" * 999)
    assert metadata_size(world.metadata("f")) == MAX_METADATA_BYTES
    failing(errno.ENOSPC, one.local.setxattr, "f", name, b"1" * 1002)


@promise("S-15", "S-121")
def test_capacity_is_shown(world: World, one: Client) -> None:
    """Statfs shows `capacity`, else 1 PiB, and what is taken once somebody has counted it; more can be written."""
    shown = resolve(one.fs.statfs(ROOT_INO))
    assert shown.blocks * shown.block_size == 1 << 50
    small = world.client(capacity_bytes=1 << 20)
    settings = small.fs.core.settings
    for used_bytes, used_files, blocks, files in ((0, 0, 0, 0), (5000, 3, 2, 3), (1 << 40, 1 << 40, 256, None)):
        small.fs.core.settings = replace(settings, used_bytes=used_bytes, used_files=used_files)
        shown = resolve(small.fs.statfs(ROOT_INO))
        assert (shown.blocks * shown.block_size, shown.name_max) == (1 << 20, 255)
        assert shown.blocks - shown.blocks_free == blocks
        assert shown.files - shown.files_free == (shown.files if files is None else files)
    small.local.write("f", bytes(2 << 20))
    assert len(world.body("f")) == 2 << 20


@promise("S-16")
@pytest.mark.parametrize("kind", MAKE)
def test_who_creates_owns(one: Client, kind: str) -> None:
    """The caller's user and group."""
    MAKE[kind](LocalFs(one.fs, Caller(11, 12, 1)))
    attr = one.again().local.stat("n")
    assert (attr.uid, attr.gid) == (11, 12)


@promise("S-16")
def test_the_group_of_a_setgid_directory(one: Client) -> None:
    """What is made in a setgid directory gets its group; directories get the bit as well."""
    one.local.mkdir("d")
    one.local.setattr("d", SetAttr(mode=0o2775, gid=77))
    local = LocalFs(one.fs, Caller(11, 12, 1))
    local.write("d/f", b"")
    local.mkdir("d/e")
    assert (local.stat("d/f").uid, local.stat("d/f").gid) == (11, 77)
    assert local.stat("d/e").gid == 77
    assert local.stat("d/e").mode & stat.S_ISGID
    assert not local.stat("d/f").mode & stat.S_ISGID


@promise("S-16")
@pytest.mark.parametrize("change", ["write by root", "write", "truncate", "open with O_TRUNC", "chown"])
def test_setuid_and_setgid_fall(world: World, one: Client, change: str) -> None:
    """A change by one who may not keep them drops both, in the store as well; a write by root leaves them."""
    one.local.write("f", b"abc")
    one.local.chmod("f", 0o6755)
    ino = one.local.stat("f").ino
    if change == "write by root":
        one.local.write("f", b"new")
    elif change == "write":
        with one.local.opened("f", os.O_WRONLY) as file:
            resolve(one.fs.write(ino, file._fh, 0, memoryview(b"x"), True))
    elif change == "truncate":
        one.local.setattr("f", SetAttr(size=1, kill_suidgid=True))
    elif change == "chown":
        one.local.setattr("f", SetAttr(uid=5, kill_suidgid=True))
    else:
        request = OpenRequest(flags=os.O_WRONLY | os.O_TRUNC, kill_suidgid=True)
        opened = resolve(one.fs.open(Caller(5, 5, 1), ino, request))
        resolve(one.fs.flush(ino, opened.fh))
        resolve(one.fs.release(ino, opened.fh))
    mode = stat.S_IFREG | (0o6755 if change == "write by root" else 0o755)
    assert one.local.stat("f").mode == mode
    assert world.metadata("f")["mode"] == str(mode)
