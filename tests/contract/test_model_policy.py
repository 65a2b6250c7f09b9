"""The rights that docs/MODELS.md gives to a namespace's keys of a central bucket: enough for a store, and no more."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from datastore.api.source import StaticCredentials
from datastore.errors import AccessDenied
from datastore.models.directory import DirectoryTree
from datastore.models.opening import opened_storage, opened_tree
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.saving import save
from datastore.models.verifying import verify
from datastore.secret import Secret
from tests.contract.conftest import location_of
from tests.modelstores import plant, wish
from tests.promises import promise
from tests.servers import Server, boto_client

PAGE = Path(__file__).resolve().parents[2] / "docs" / "MODELS.md"


def restricted(server: Server, policy: str) -> StaticCredentials:
    """Keys of a session that the policy limits."""
    client = boto3.client(
        "sts",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )
    role = "arn:aws:iam::123456789012:role/team"  # has to be said, and is not looked at
    keys = client.assume_role(RoleArn=role, RoleSessionName="team", Policy=policy)["Credentials"]
    secret, token = Secret(keys["SecretAccessKey"]), Secret(keys["SessionToken"])
    return StaticCredentials(access_key_id=keys["AccessKeyId"], secret_access_key=secret, session_token=token)


@promise("S-421")
def test_the_policy_of_the_page_is_enough_and_reaches_no_other_prefix(minio: Server, tmp_path: Path) -> None:
    """In a bucket with object lock, with an upload in parts and copies by the server."""
    found = re.search(r"```json\n(  \{\"Version\".*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    bucket = f"all-models-{os.getpid()}"
    boto_client(minio).create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    credentials = restricted(minio, found[1].replace("all-models", bucket))
    own = replace(location_of(minio, bucket), prefix="vision/models/", credentials=credentials)
    source = DirectoryTree(plant(tmp_path / "source", large=17 << 20))
    with opened_storage(own) as storage:
        models = Models(storage, who="tester")
        save(models, source, wish(), Progress())
        with opened_tree(own, "digits/1") as tree:
            save(models, tree, wish(force=True), Progress())
        assert verify(models, "digits", 2, Progress())[1] == []
        models.set_alias("digits", "prod", 2)
        models.delete("digits", 1)
        assert list(models.garbage("digits")) == []
        assert [each.version for each in models.versions("digits")] == [2]
    for prefix in ("audio/models/", "vision/", ""):
        with pytest.raises(AccessDenied), opened_storage(replace(own, prefix=prefix)) as storage:
            save(Models(storage, who="tester"), source, wish(), Progress())
