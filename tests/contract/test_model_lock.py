"""Versions in a bucket with object lock (MinIO): locked as long as they are versions, and not for longer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from datastore.fuse.store.s3 import open_s3
from datastore.models.directory import DirectoryTree
from datastore.models.objects import Objects, ObjectStorage, ObjectTree, Place
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.saving import save
from datastore.models.verifying import verify
from tests.contract.conftest import location_of
from tests.modelstores import plant, wish
from tests.promises import promise
from tests.servers import Server, boto_client


def held(client: Any, bucket: str, key: str) -> bool:
    return bool(client.get_object_legal_hold(Bucket=bucket, Key=key)["LegalHold"]["Status"] == "ON")


@promise("S-389")
def test_a_version_is_locked_until_it_is_deleted(minio: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Uploaded in one piece and in parts, copied by the server, directories, links and the manifest."""
    bucket = f"locked-{os.getpid()}"
    client = boto_client(minio)
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    store = open_s3(location_of(minio, bucket))
    objects = Objects(store, Place("minio", bucket), store.metrics)
    request.addfinalizer(objects.close)
    models = Models(ObjectStorage(objects, "store/"), who="tester")
    source = plant(tmp_path / "source", large=17 << 20)

    save(models, DirectoryTree(source), wish(), Progress())
    save(models, ObjectTree(objects, "store/digits/1/", within=""), wish(force=True), Progress())

    keys = [each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]]
    versions = [key for key in keys if key.startswith(("store/digits/1", "store/digits/2"))]
    assert len(versions) == 2 * (1 + 11), "a manifest, and all but the directory that needs no object"
    assert all(held(client, bucket, key) for key in versions)
    [weights] = [
        each for each in client.list_object_versions(Bucket=bucket)["Versions"] if each["Key"].endswith("1/weights")
    ]
    with pytest.raises(botocore.exceptions.ClientError, match=r"AccessDenied|WORM"):
        client.delete_object(Bucket=bucket, Key=weights["Key"], VersionId=weights["VersionId"])
    assert verify(models, "digits", 2, Progress())[1] == []

    models.set_alias("digits", "prod", 2)
    models.set_alias("digits", "prod", 1)
    models.set_alias("digits", "prod", 2)
    models.delete("digits", 1)

    client.delete_object(Bucket=bucket, Key=weights["Key"], VersionId=weights["VersionId"])
    left = [each["Key"] for each in client.list_objects_v2(Bucket=bucket, Prefix="store/digits/1")["Contents"]]
    assert left == ["store/digits/1.json"]
    for each in client.list_objects_v2(Bucket=bucket, Prefix="store/digits/2")["Contents"]:
        assert held(client, bucket, each["Key"])


@promise("S-389")
def test_a_bucket_without_lock_is_asked_once(minio: Server, versitygw: Server, tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    for server in (minio, versitygw):
        bucket = f"plain-{os.getpid()}"
        boto_client(server).create_bucket(Bucket=bucket)
        store = open_s3(location_of(server, bucket))
        objects = Objects(store, Place(server.name, bucket), store.metrics)
        save(Models(ObjectStorage(objects, ""), who="tester"), DirectoryTree(source), wish(), Progress())
        asked = store.metrics.snapshot()
        assert (asked["has_object_lock"]["calls"], "set_legal_hold" in asked) == (1, False)
        objects.close()
