"""Amazon S3 and compatible servers: the only package of the mount that knows botocore and HTTP."""

from __future__ import annotations

from .client import open_s3
from .credentials import CredentialSource, StaticSource, find_source
from .probe import probe, remove_bucket

__all__ = ["CredentialSource", "StaticSource", "find_source", "open_s3", "probe", "remove_bucket"]
