"""Symbolic links and special files on a real mount (docs/SEMANTICS.md, Links and special files)."""

from __future__ import annotations

import errno
import mailbox
import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from tests.mount.mounts import Area, fails, opened, rclone, settle
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]

TARGETS = {
    "relative": b"dir/file",
    "upwards": b"../other/place",
    "dangling": b"/does/not/exist",
    "directory": b"dir",
    "dot": b".",
    "bytes": b"caf\xe9 \x01\xff",
    "unicode": "naïve/日本".encode(),
    "longest": (b"x" * 254 + b"/") * 16 + b"y" * 15,
}


@pytest.fixture
def links(area: Area) -> Area:
    """An area with every kind of link."""
    (area.path / "dir").mkdir()
    (area.path / "dir/file").write_bytes(b"content")
    for name, target in TARGETS.items():
        os.symlink(target, os.fsencode(area.path / name))
    return area


def assert_links(place: Path) -> None:
    for name, target in TARGETS.items():
        link = os.fsencode(place / name)
        assert os.readlink(link) == target
        seen = os.lstat(link)
        assert stat.S_ISLNK(seen.st_mode)
        assert seen.st_size == len(target)
    assert (place / "relative").read_bytes() == b"content"
    assert os.listdir(place / "directory") == ["file"]
    assert not (place / "dangling").exists()


@promise("S-06")
def test_links_are_plain_objects_and_survive_the_mount(links: Area) -> None:
    """The object `x.rclonelink` holds the target: relative, dangling, to a directory, of any bytes, of 4,095 bytes."""
    assert len(TARGETS["longest"]) == 4095
    for name, target in TARGETS.items():
        assert links.get(f"{name}.rclonelink") == target
    assert_links(links.path)
    links.mount.remount()
    assert_links(links.path)


@promise("S-09", "S-38")
def test_a_link_whose_name_the_server_finds_too_long(area: Area) -> None:
    """Where `.rclonelink` does not fit besides (in 255 bytes, versitygw: 227), the link is s3fs's."""
    name = "n" * (250 if area.server.name == "minio" else 220)
    os.symlink("target", area.path / name)
    assert area.keys() == ["", name]
    area.mount.remount()
    assert os.readlink(area.path / name) == "target"
    assert os.lstat(area.path / name).st_size == len("target")


@promise("S-10")
def test_fifos_and_sockets(area: Area) -> None:
    """Special files last, and work within one machine."""
    os.mkfifo(area.path / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listening, opened(area.path, os.O_PATH) as fd:
        listening.bind(f"/proc/self/fd/{fd}/socket")  # the whole path may be too long for a socket
    area.mount.remount()
    assert (area.path / "fifo").lstat().st_mode == stat.S_IFIFO | 0o640
    assert stat.S_ISSOCK((area.path / "socket").lstat().st_mode)
    fifo = area.path / "fifo"
    with opened(fifo, os.O_NONBLOCK) as reader, opened(fifo, os.O_WRONLY) as writer:
        os.write(writer, b"through")
        assert os.read(reader, 100) == b"through"
    assert area.get("fifo") == b""


@promise("S-10")
@pytest.mark.root_only
def test_devices_are_kept_and_opened_by_nobody(area: Area) -> None:
    """Type and number survive chmod, rename and a remount; the mount is nodev, also where it is bound."""
    kinds = {"character": stat.S_IFCHR, "block": stat.S_IFBLK}
    for name, kind in kinds.items():
        os.mknod(area.path / "made", kind | 0o600, os.makedev(1, 300))
        (area.path / "made").chmod(0o640)
        (area.path / "made").rename(area.path / name)
        area.put(f"{name}-of-s3fs", mode=str(kind | 0o600), uid="0", gid="0", mtime="1")
    area.mount.remount()
    for name, kind in kinds.items():
        for path, number in ((area.path / name, os.makedev(1, 300)), (area.path / f"{name}-of-s3fs", 0)):
            seen = path.lstat()
            assert (stat.S_IFMT(seen.st_mode), seen.st_rdev) == (kind, number), path
            fails(errno.EACCES, open, path, "rb")
        assert area.metadata(name)["mode"] == str(kind | 0o640)
    assert os.statvfs(area.path).f_flag & os.ST_NODEV
    bound = area.mount.folder / "bound"
    bound.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", str(area.path), str(bound)], check=True)
    try:
        for name in kinds:
            fails(errno.EACCES, open, bound / name, "rb")
    finally:
        subprocess.run(["umount", str(bound)], check=True)


@promise("S-10")
def test_hard_links_are_refused(area: Area) -> None:
    """EPERM, at once, and nothing is made; a program that can do without renames instead."""
    (area.path / "file").write_bytes(b"x")
    fails(errno.EPERM, os.link, area.path / "file", area.path / "second")
    assert os.listdir(area.path) == ["file"]
    assert (area.path / "file").stat().st_nlink == 1
    mailbox.Maildir(area.path / "mail").add("Subject: hello")
    assert [letter["subject"] for letter in mailbox.Maildir(area.path / "mail")] == ["hello"]


@promise("S-07")
def test_rclone_recreates_our_links(has_rclone: None, links: Area, tmp_path: Path) -> None:
    """`rclone copy --links` makes the same links on a disk; so the objects are what rclone expects."""
    # rclone reads no link of 4 KiB and no bytes that are not UTF-8 in a JSON listing, but copies what it can name.
    rclone(links.mount.server, "copy", "--links", f"s3:{links.mount.bucket}/{links.name}", tmp_path / "copy")
    for name, target in TARGETS.items():
        assert os.readlink(os.fsencode(tmp_path / "copy" / name)) == target
    assert (tmp_path / "copy/relative").read_bytes() == b"content"


@promise("S-07")
def test_we_read_links_of_rclone(has_rclone: None, area: Area, tmp_path: Path) -> None:
    """What `rclone copy --links` put there are links."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"content")
    (tmp_path / "a/link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("no/where")
    rclone(area.mount.server, "copy", "--links", tmp_path, f"s3:{area.mount.bucket}/{area.name}")
    settle()
    assert os.readlink(area.path / "a/link") == "file"
    assert (area.path / "a/link").read_bytes() == b"content"
    assert os.readlink(area.path / "dangling") == "no/where"


@promise("S-01")
def test_rclone_sees_empty_directories(has_rclone: None, area: Area, tmp_path: Path) -> None:
    """With a version that knows markers rclone copies the empty directory; older ones list its key."""
    (area.path / "empty").mkdir()
    remote = f"s3:{area.mount.bucket}/{area.name}"
    directories = rclone(area.mount.server, "lsf", "--dirs-only", remote).split()
    assert directories == ["empty/"]
    assert area.exists("empty/")
