"""What real servers make of a part that arrives otherwise than it was sent."""

from __future__ import annotations

import base64
from contextlib import closing
from dataclasses import replace

import pytest

from datastore.errors import CorruptBody
from datastore.fuse.store.base import PartNumber, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3 import checksums, probe
from tests.adapter import open_adapter
from tests.contract.conftest import location_of
from tests.promises import promise


@promise("S-131")
@pytest.mark.parametrize("name", ["versitygw", "minio"])
def test_a_damaged_part_beside_copied_ones_is_refused(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its MD5; the same part as it is is taken."""
    location = location_of(request.getfixturevalue(name), "damage")
    probe(replace(location, create=True), writable=True, deadline_s=100)
    with closing(BlockingStore(open_adapter(location))) as store:
        upload = store.create_upload("k", WriteOptions(), copies=True)
        with monkeypatch.context() as patched:
            patched.setattr(checksums, "md5_of", lambda _: base64.b64encode(bytes(16)).decode())
            with pytest.raises(CorruptBody):
                store.upload_part("k", upload, PartNumber(1), b"body")
        part = store.upload_part("k", upload, PartNumber(1), b"body")
        store.complete_upload("k", upload, [(PartNumber(1), part)], WriteOptions())
        assert bytes(store.get("k")[0]) == b"body"
