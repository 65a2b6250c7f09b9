"""Attributes on a real mount (docs/SEMANTICS.md, Attributes)."""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.mount.conftest import ONE_SERVER, Mounter
from tests.mount.mounts import TTL, Area, fails, settle
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server

pytestmark = pytest.mark.fuse
WAYS = ONE_SERVER

OTHER_GID = 43210
NOBODY = 65534
BLUE = b"blue\x00\xff" * 20


@promise("S-129", "S-130")
@pytest.mark.parametrize("files", [40, 1050])
def test_a_walk_asks_minio_for_a_listing_alone(mount_with: Mounter, minio: Server, files: int) -> None:
    """Its listing has the attributes; also one of two pages, and a change by another tool is seen."""
    with mount_with(server=minio, metadataTTL=TTL) as mount:
        names = [f"odd {number:04d} \N{LATIN SMALL LETTER U WITH DIAERESIS}&" for number in range(files)]
        mount.objects.put_empty(names[1:])
        mount.objects.put(names[0], b"", mode=str(stat.S_IFREG | 0o640), uid="7", mtime="1500000000.000000007")
        mount.objects.put("link.rclonelink", b"target", mode=str(stat.S_IFLNK | 0o777), gid="8")
        settle()

        def walk() -> dict[str, os.stat_result]:
            with os.scandir(mount.path) as entries:
                return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}

        seen = walk()
        assert sorted(seen) == ["link", *names]
        assert (seen["link"].st_mode, seen["link"].st_gid) == (stat.S_IFLNK | 0o777, 8)
        first = seen[names[0]]
        assert (first.st_mode, first.st_uid, first.st_mtime_ns) == (stat.S_IFREG | 0o640, 7, 1_500_000_000_000_000_007)
        mount.objects.put(names[0], b"", mode=str(stat.S_IFREG | 0o604))
        # What took long to list is believed for longer than metadataTTL (S-28).
        eventually(lambda: walk()[names[0]].st_mode == stat.S_IFREG | 0o604, "the other mode")
        assert mount.calls().get("head", 0) == 0


@promise("S-08", "S-13")
@pytest.mark.plain_user
def test_listing_mode_asks_for_nothing(mount_with: Mounter) -> None:
    """Defaults and LastModified, no HEAD for a stat; changes of attributes are written for the others.

    Links of s3fs look like files.
    """
    with mount_with(attributes="listing") as mount:
        mount.objects.put("of-s3fs", b"some/target", mode=str(stat.S_IFLNK | 0o777))
        mount.objects.put("file", b"x", mode=str(stat.S_IFREG | 0o600), mtime="1000000000.0")
        file = mount.path / "file"
        seen = file.stat()
        assert stat.S_IMODE(seen.st_mode) == 0o644
        assert (seen.st_uid, seen.st_gid) == (os.getuid(), os.getgid())
        modified = mount.objects.head("file")["LastModified"].timestamp()
        assert abs(seen.st_mtime - modified) < 1
        assert stat.S_ISREG((mount.path / "of-s3fs").lstat().st_mode)
        assert mount.calls().get("head", 0) == 0
        fails(errno.EOPNOTSUPP, os.setxattr, file, "user.a", b"b")
        os.chmod(file, 0o640)
        kept = mount.objects.head("file")["Metadata"]
        assert kept["mode"] == str(stat.S_IFREG | 0o640)
        assert kept["mtime"] == "1000000000.000000000"
        with mount_with(mount.bucket) as full:
            assert stat.S_IMODE((full.path / "file").stat().st_mode) == 0o640


@promise("S-14")
def test_extended_attributes(area: Area) -> None:
    """User.* lasts, also of a directory, follows a rename, and goes when removed; flags are honoured.

    Over 2 KiB in all is ENOSPC, other namespaces are EOPNOTSUPP; what was there stays.
    """
    os.setxattr(area.path, "user.of-directory", b"b")
    file = area.path / "file"
    file.write_bytes(b"x")
    os.setxattr(file, "user.colour", BLUE)
    os.setxattr(file, "user.empty", b"")
    fails(errno.EEXIST, os.setxattr, file, "user.colour", b"red", os.XATTR_CREATE)
    fails(errno.ENODATA, os.setxattr, file, "user.other", b"red", os.XATTR_REPLACE)
    fails(errno.ENODATA, os.getxattr, file, "user.other")
    fails(errno.ENOSPC, os.setxattr, file, "user.large", b"b" * 2000)
    fails(errno.EOPNOTSUPP, os.setxattr, file, "trusted.a", b"b")
    fails(errno.EOPNOTSUPP, os.setxattr, file, "security.a", b"b")
    file.rename(area.path / "renamed")
    area.mount.remount()
    renamed = area.path / "renamed"
    assert os.getxattr(area.path, "user.of-directory") == b"b"
    assert sorted(os.listxattr(renamed)) == ["user.colour", "user.empty"]
    assert os.getxattr(renamed, "user.colour") == BLUE
    assert os.getxattr(renamed, "user.empty") == b""
    os.removexattr(renamed, "user.colour")
    fails(errno.ENODATA, os.removexattr, renamed, "user.colour")
    assert os.listxattr(renamed) == ["user.empty"]


@promise("S-15")
def test_statfs(area: Area, mount_with: Mounter) -> None:
    """1 PiB where no capacity is set; that is shown, and not enforced."""
    seen = os.statvfs(area.path)
    assert seen.f_blocks * seen.f_frsize == 1 << 50
    with mount_with(capacity="1Mi", transport=area.mount.transport) as small:
        seen = os.statvfs(small.path)
        assert seen.f_blocks * seen.f_frsize == 1 << 20
        (small.path / "large").write_bytes(bytes(2 << 20))
        assert small.objects.head("large")["ContentLength"] == 2 << 20


@pytest.fixture
def as_nobody(area: Area) -> Path:
    """The area for everybody; root can become somebody else."""
    for directory in (area.mount.folder.parent, area.mount.folder):
        directory.chmod(0o755)
    area.path.chmod(0o777)
    return area.path


def run_as(uid: int, gid: int, script: str, *arguments: str | Path) -> None:
    """Run Python code as another user, who has no privileges."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    if os.stat(sys.executable).st_uid == 0:
        # The interpreter may be out of that user's reach: change user when it runs.
        script = f"import os, sys\nos.setgroups([])\nos.setgid({gid})\nos.setuid({uid})\n{script}"
        command[2] = script
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@promise("S-16")
def test_who_creates_owns(as_nobody: Path) -> None:
    """The caller's uid and gid; the group of a setgid directory, which passes its bit on."""
    (as_nobody / "group").mkdir()
    os.chown(as_nobody / "group", -1, OTHER_GID)
    (as_nobody / "group").chmod(0o2777)
    script = """
for place in ("", "group/"):
    open(sys.argv[1] + "/" + place + "file", "w").close()
    os.mkdir(sys.argv[1] + "/" + place + "dir")
    os.symlink("x", sys.argv[1] + "/" + place + "link")
"""
    run_as(NOBODY, NOBODY, script, as_nobody)
    for name in ("file", "dir", "link"):
        own, inherited = (as_nobody / name).lstat(), (as_nobody / "group" / name).lstat()
        assert (own.st_uid, own.st_gid) == (NOBODY, NOBODY)
        assert (inherited.st_uid, inherited.st_gid) == (NOBODY, OTHER_GID)
    assert (as_nobody / "group/dir").stat().st_mode & stat.S_ISGID


@promise("S-16")
@pytest.mark.parametrize("change", ["write", "truncate", "chown"])
def test_setuid_falls_with_a_change(as_nobody: Path, change: str) -> None:
    """A write, truncate or chown by one who may not keep setuid and setgid drops them."""
    file = as_nobody / "file"
    file.write_bytes(b"content")
    os.chown(file, NOBODY, NOBODY)
    file.chmod(0o6777)
    calls = {
        "write": 'fd = os.open(path, os.O_WRONLY); os.write(fd, b"x"); os.close(fd)',
        "truncate": "os.truncate(path, 3)",
        "chown": f"os.chown(path, -1, {NOBODY})",
    }
    run_as(NOBODY, NOBODY, f"path = sys.argv[1]\n{calls[change]}\n", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o777


@promise("S-163")
def test_own_changes_stay(area: Area) -> None:
    """Chmod, chown, touch and setfattr of objects that are older than the second in which they were looked at,
    of our own and of another tool; versitygw keeps ETag and LastModified of an object whose attributes change."""
    (area.path / "ours").write_bytes(b"x")
    area.put("theirs", b"x")
    files = [area.path / name for name in ("ours", "theirs")]
    time.sleep(2.0)
    for file in files:
        file.stat()
    changes: list[Callable[[Path], None]] = [
        lambda file: file.chmod(0o640),
        lambda file: os.chown(file, 77, 88),
        lambda file: os.utime(file, ns=(5, 7)),
        lambda file: os.setxattr(file, "user.a", b"1"),
    ]
    for number, change in enumerate(changes):
        for file in files:
            change(file)
        for _ in range(2):
            settle()
            os.listdir(area.path)
            for file in files:
                seen = file.stat()
                shown = (seen.st_mode & 0o777, seen.st_uid, seen.st_mtime_ns, os.listxattr(file))
                expected = (0o640, 77, 7, ["user.a"])[: number + 1]
                assert shown[: number + 1] == expected, file.name


@promise("S-14")
def test_every_attribute_that_is_listed_can_be_read(area: Area) -> None:
    """Other namespaces, as s3fs and others write them, are neither, and stay in the object (`rsync -aX`)."""
    names = ("user.ours", "security.capability", "trusted.x", "system.posix_acl_access", "plain")
    encoded = {name: base64.b64encode(b"content").decode() for name in names}
    area.put("file", b"x", xattr=quote(json.dumps(encoded)))
    settle()
    path = area.path / "file"
    assert os.listxattr(path) == ["user.ours"]
    assert os.getxattr(path, "user.ours") == b"content"
    path.chmod(0o600)
    assert set(json.loads(unquote(area.metadata("file")["xattr"]))) == set(names)
