"""Directories on a real mount (docs/SEMANTICS.md, Directories)."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from tests.mount.conftest import Mounter, new_bucket
from tests.mount.mounts import TTL, Area, fails, opened, settle
from tests.promises import promise
from tests.servers import Server, boto_client

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]


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
