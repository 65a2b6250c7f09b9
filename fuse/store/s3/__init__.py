"""Amazon S3 and what speaks like it: the only place that knows boto and HTTP."""

from __future__ import annotations

from .client import open_s3
from .credentials import CredentialSource, StaticSource, find_source
from .probe import probe, remove_bucket

__all__ = ["CredentialSource", "StaticSource", "find_source", "open_s3", "probe", "remove_bucket"]
