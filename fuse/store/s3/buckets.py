"""Removing a bucket: for who made it. Everything else works inside one."""

from __future__ import annotations

from datastore.api.source import S3Location
from datastore.errors import BucketNotFound

from ...loop import now
from .caller import Caller
from .connections import TransportLimits
from .factory import gather
from .messages import Request


def remove_bucket(location: S3Location, deadline_s: float = 10.0) -> None:
    """Remove an empty bucket; success when it is not there. Errors: StoreError, InvalidRequest when it is not empty."""
    parts = gather(location, TransportLimits(connections=1, call_s=deadline_s))
    caller = Caller(parts.endpoint, parts.credentials, parts.connect, follow=not location.region)
    try:
        now(caller.send(Request(method="DELETE")))
    except BucketNotFound:
        return
    finally:
        caller.close()
