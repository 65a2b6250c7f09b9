"""What identifies bytes that never change: one version of one object."""

from __future__ import annotations

from typing import NamedTuple

from ..store.base import ETag


class ObjectVersion(NamedTuple):
    """One version of an object of the mount's bucket; `size` is the whole object's, bytes."""

    key: str
    etag: ETag
    size: int
