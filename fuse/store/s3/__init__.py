"""Amazon S3 and what speaks like it: the only place that knows boto, obstore and HTTP."""

from __future__ import annotations

from .factory import open_adapter, open_s3
from .probe import probe

__all__ = ["open_adapter", "open_s3", "probe"]
