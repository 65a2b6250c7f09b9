"""Opens the bare S3 client, without retries and metrics."""

from __future__ import annotations

from typing import Any

from datastore.api.source import S3Location
from datastore.fuse.store.base import ObjectStore
from datastore.fuse.store.s3 import open_s3


def open_adapter(location: S3Location, **options: Any) -> ObjectStore:
    """Open the bucket's client. options: those of open_s3()."""
    return open_s3(location, **options).inner
