"""Directories on a real mount (docs/SEMANTICS.md, Directories)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat

import pytest

from tests.mount.conftest import Mounter, new_bucket
from tests.mount.mounts import TTL, Area, Mount, fails, opened, settle
from tests.promises import promise
from tests.servers import Server, boto_client

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]


@promise("S-01")
def test_mkdir_writes_a_marker_that_any_client_sees(area: Area, other: Mount) -> None:
    """The directory is an empty object `dir/` of the usual type. Another mount sees it, and its end."""
    (area.path / "empty").mkdir(mode=0o750)
    head = area.head("empty/")
    assert head["ContentLength"] == 0
    assert head["ContentType"] == "application/x-directory"
    assert area.keys() == ["", "empty/"]
    there = other.path / area.name
    settle()
    assert os.listdir(there) == ["empty"]
    (area.path / "empty").rmdir()
    settle()
    assert os.listdir(there) == []


@promise("S-01")
def test_directories_survive_the_mount(area: Area) -> None:
    """Empty, emptied and nested directories are there at the next mount, with their modes."""
    (area.path / "a/b/c").mkdir(parents=True)
    (area.path / "emptied").mkdir(mode=0o701)
    (area.path / "emptied/file").write_bytes(b"x")
    (area.path / "emptied/file").unlink()
    area.mount.remount()
    found = sorted(os.path.relpath(top, area.path) for top, _, _ in os.walk(area.path))
    assert found == [".", "a", "a/b", "a/b/c", "emptied"]
    assert stat.S_IMODE((area.path / "emptied").stat().st_mode) == 0o701


@promise("S-02", "S-03")
def test_an_implied_directory_stays_without_its_last_entry(area: Area) -> None:
    """A directory that only other tools' keys implied stays when its entries are removed or moved away."""
    area.put("implied/one", b"1")
    area.put("left/one", b"1")
    settle()
    (area.path / "implied/one").unlink()
    (area.path / "left/one").rename(area.path / "moved")
    assert sorted(os.listdir(area.path)) == ["implied", "left", "moved"]
    assert sorted(area.keys()) == ["", "implied/", "left/", "moved"]


@promise("S-04")
def test_rmdir_asks_the_store(area: Area) -> None:
    """What another client wrote a moment ago makes it ENOTEMPTY, also when a listing showed nothing."""
    (area.path / "d").mkdir()
    assert os.listdir(area.path / "d") == []
    area.put("d/new", b"x")
    fails(errno.ENOTEMPTY, os.rmdir, area.path / "d")
    assert area.get("d/new") == b"x"


@promise("S-05")
def test_a_pass_shows_every_entry_once_while_entries_go(area: Area) -> None:
    """One snapshot a pass, however many answers it takes; rm -r's way of reading."""
    names = [f"file-with-a-rather-long-name-{number:04d}" for number in range(400)]
    area.put_empty(names)
    settle()
    seen = []
    with os.scandir(area.path) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 2:
                os.unlink(entry.path)
    assert sorted(seen) == names
    assert sorted(os.listdir(area.path)) == sorted(set(names) - set(seen[1::2]))


@promise("S-05")
def test_rewinddir_takes_a_new_snapshot(area: Area) -> None:
    """The same descriptor read again from the start shows what is there then."""
    (area.path / "one").mkdir()
    with opened(area.path, os.O_DIRECTORY) as fd:
        assert os.listdir(fd) == ["one"]
        (area.path / "two").mkdir()
        (area.path / "one").rmdir()
        assert os.listdir(fd) == ["two"]  # listdir(fd) rewinds


@promise("S-05")
def test_a_directory_of_more_than_a_page(area: Area) -> None:
    """1,010 entries take two pages of a listing; names are found one by one as well."""
    names = [f"{number:04d}" for number in range(1010)]
    area.put_empty(names)
    settle()
    assert sorted(os.listdir(area.path)) == names
    assert (area.path / "1009").stat().st_size == 0
    assert not (area.path / "1010").exists()


@promise("S-199")
def test_what_was_removed_from_a_bucket_with_versioning_stays_removed(minio: Server, mount_with: Mounter) -> None:
    """MinIO goes on listing the prefix of a directory whose keys all have delete markers."""
    bucket = new_bucket(minio)
    boto_client(minio).put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with mount_with(bucket, minio, metadataTTL=TTL) as mount:
        (mount.path / "removed" / "below").mkdir(parents=True)
        (mount.path / "removed" / "below" / "file").write_text("x")
        (mount.path / "stays").mkdir()
        shutil.rmtree(mount.path / "removed")
        mount.objects.put("others/file", b"x")
        settle()
        assert sorted(os.listdir(mount.path)) == ["others", "stays"]
        mount.objects.delete("others/file")
        settle()
        assert os.listdir(mount.path) == ["stays"]
        assert not (mount.path / "removed").exists()
        assert not (mount.path / "others").exists()
        mount.remount()
        assert os.listdir(mount.path) == ["stays"]


@promise("S-199")
@pytest.mark.parametrize("name", ["versitygw", "minio"])
def test_what_an_object_lock_keeps_can_not_be_removed(
    request: pytest.FixtureRequest, mount_with: Mounter, name: str
) -> None:
    """EPERM, as of an immutable file; doctor says so and writes nothing that would stay."""
    server: Server = request.getfixturevalue(name)
    client, bucket = boto_client(server), f"locked-{os.getpid()}"
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    lock = {"ObjectLockEnabled": "Enabled", "Rule": rule}
    client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=lock)
    with mount_with(bucket, server, metadataTTL=TTL) as mount:
        (mount.path / "d").mkdir()
        fails(errno.EPERM, (mount.path / "d").rmdir)
        assert not any(tally["retries"] for tally in mount.told()["store"].values()), "no second try"
        assert (mount.path / "d").is_dir()
        doctor = mount.command("doctor", mount.folder / "datastore.yaml", "-o", "json")
        found = [each for each in json.loads(doctor.stdout) if each["check"] == "work"]
        assert [each["level"] for each in found] == ["ok", "warn"], doctor.stdout
        assert "object lock" in found[-1]["text"]
        assert mount.objects.keys() == ["d/"]


@promise("S-04")
def test_bytes_in_a_directorys_object_are_not_removed_with_it(minio: Server, mount_with: Mounter) -> None:
    """No file of the mount shows them."""
    with mount_with(server=minio, metadataTTL=TTL) as mount:
        mount.objects.put("d/", b"written by another tool")
        fails(errno.ENOTEMPTY, (mount.path / "d").rmdir)
        assert not any(tally["retries"] for tally in mount.told()["store"].values()), "no second try"
        assert mount.objects.get("d/") == b"written by another tool"
        assert (mount.path / "d").is_dir()


@promise("S-165")
def test_an_object_that_stands_for_a_directory(area: Area) -> None:
    """Without a slash, as older tools write it, and only its type says so; it gets one when it is changed."""
    owner = os.getuid() or 7
    headers = {"mode": str(stat.S_IFDIR | 0o750), "uid": str(owner), "gid": str(os.getgid() or 8), "mtime": "1"}
    for name in ("empty", "filled", "renamed", "gone"):
        area.put(name, b"", "application/x-directory", **headers)
    settle()
    with os.scandir(area.path) as entries:
        assert {entry.name: entry.stat().st_mode for entry in entries} == dict.fromkeys(
            ("empty", "filled", "renamed", "gone"), stat.S_IFDIR | 0o750
        )
    assert os.listdir(area.path / "empty") == []
    (area.path / "filled/sub").mkdir(parents=True)
    (area.path / "filled/sub/file").write_bytes(b"x")
    (area.path / "renamed").rename(area.path / "moved")
    (area.path / "gone").rmdir()
    assert sorted(area.keys()) == ["", "empty", "filled/", "filled/sub/", "filled/sub/file", "moved/"]
    settle()
    area.mount.remount()
    assert sorted(os.listdir(area.path)) == ["empty", "filled", "moved"]
    for name in ("empty", "filled", "moved"):
        seen = (area.path / name).stat()
        assert (seen.st_mode, seen.st_uid) == (stat.S_IFDIR | 0o750, owner)
