"""The place of a Datastore in a bucket, on real servers: datastore.backends.s3."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from datastore.backends.base import Identity, Owner
from datastore.backends.s3 import S3Backend
from datastore.backends.stores import Stores
from datastore.errors import BucketNotFound
from tests.contract.conftest import location_of
from tests.promises import promise
from tests.servers import Server, boto_client, make_bucket


@promise("S-71")
@pytest.mark.parametrize("region", ["", "us-east-1"])
def test_a_bucket_that_was_made_and_is_gone_is_not_made_anew(versitygw: Server, region: str) -> None:
    """Programs would find an empty directory where their data was, and write to it."""
    name = f"made-{uuid.uuid4().hex[:8]}"
    location = replace(location_of(versitygw, name), create=True, region=region)
    client, stores = boto_client(versitygw), Stores.once()

    def backend(*, made: bool) -> S3Backend:
        identity = Identity(namespace="team", name="digits", uid="one")
        return S3Backend(location, identity, stores, writable=True, made=made)

    try:
        assert backend(made=False).ensure().owner is Owner.THIS
        assert backend(made=True).ensure().owner is Owner.THIS
        for each in client.list_objects_v2(Bucket=name)["Contents"]:
            client.delete_object(Bucket=name, Key=each["Key"])
        client.delete_bucket(Bucket=name)
        with pytest.raises(BucketNotFound, match=f"bucket {name} at http.* is gone, and is not created again: restore"):
            backend(made=True).ensure()
        assert name not in [each["Name"] for each in client.list_buckets()["Buckets"]]
        make_bucket(versitygw, name)
        assert backend(made=True).ensure().owner is Owner.THIS
    finally:
        stores.close()
