"""s3fs beside a mount of ours, on one bucket: what either writes the other shows, and keeps (docs/SEMANTICS.md)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.mounts import Area, Mount, settle
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.root_only]
WAYS = ("versitygw-kernel", "minio-kernel")
MTIME = 1_234_567_890


@pytest.fixture(scope="module")
def s3fs_path(shared: Mount) -> Iterator[Path]:
    """The bucket, mounted by s3fs, which remembers nothing of it."""
    if shutil.which("s3fs") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("s3fs is not installed")
        pytest.skip("s3fs is not installed")
    target, keys = shared.folder / "s3fs", shared.folder / "s3fs-keys"
    target.mkdir()
    keys.touch(mode=0o600)
    keys.write_text(f"{shared.server.access_key}:{shared.server.secret_key}\n")
    options = f"url={shared.server.endpoint},use_path_request_style,passwd_file={keys},use_xattr,stat_cache_expire=0"
    done = subprocess.run(
        ["s3fs", shared.bucket, target, "-o", options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    eventually(lambda: os.path.ismount(target), "s3fs has mounted")
    yield target
    subprocess.run(["fusermount3", "-u", "-z", str(target)], check=False)


def make(directory: Path) -> None:
    """One of everything that either can hold, with attributes."""
    (directory / "page.html").write_bytes(b"<p>one</p>")
    os.chmod(directory / "page.html", 0o640)
    os.chown(directory / "page.html", 77, 88)
    os.setxattr(directory / "page.html", "user.colour", b"blue\x00\xff")
    os.utime(directory / "page.html", (MTIME, MTIME))
    (directory / "dir").mkdir(mode=0o750)
    (directory / "dir/inside").write_bytes(b"x")
    (directory / "link").symlink_to("page.html")
    os.mkfifo(directory / "fifo", 0o600)
    os.mknod(directory / "char", stat.S_IFCHR | 0o620, os.makedev(1, 3))
    os.mknod(directory / "block", stat.S_IFBLK | 0o660, os.makedev(7, 1))


def change(directory: Path) -> None:
    """What must lose nothing."""
    with (directory / "page.html").open("ab") as file:
        file.write(b"<p>two</p>")
    os.chmod(directory / "page.html", 0o600)
    os.chmod(directory / "char", 0o600)
    (directory / "page.html").rename(directory / "renamed.html")
    (directory / "char").rename(directory / "char-renamed")
    os.utime(directory / "renamed.html", (MTIME, MTIME))


def shows(directory: Path) -> None:
    """All of make(), after change()."""
    file = directory / "renamed.html"
    assert file.read_bytes() == b"<p>one</p><p>two</p>"
    seen = file.stat()
    assert (stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid, seen.st_mtime) == (0o600, 77, 88, MTIME)
    assert os.getxattr(file, "user.colour") == b"blue\x00\xff"
    assert (directory / "dir/inside").read_bytes() == b"x"
    assert stat.S_IMODE((directory / "dir").stat().st_mode) == 0o750
    kinds = {name: stat.S_IFMT((directory / name).lstat().st_mode) for name in ("fifo", "char-renamed", "block")}
    assert kinds == {"fifo": stat.S_IFIFO, "char-renamed": stat.S_IFCHR, "block": stat.S_IFBLK}


@promise("S-08", "S-10", "S-11", "S-14", "S-164")
@pytest.mark.parametrize(("maker", "changer"), [("ours", "s3fs"), ("s3fs", "ours")])
def test_either_keeps_what_the_other_wrote(area: Area, s3fs_path: Path, maker: str, changer: str) -> None:
    """Type, mode, owner, times, attributes and content type, both ways."""
    at = {"ours": area.path, "s3fs": s3fs_path / area.name}
    make(at[maker])
    settle()
    if maker == "s3fs":
        assert os.readlink(area.path / "link") == "page.html"
    change(at[changer])
    settle()
    for directory in at.values():
        shows(directory)
    assert area.head("renamed.html")["ContentType"] == "text/html"
    area.mount.remount()
    shows(area.path)
    if maker == "ours":
        assert (area.path / "block").lstat().st_rdev == os.makedev(7, 1)
        assert (area.path / "char-renamed").lstat().st_rdev == os.makedev(1, 3)
