"""The bench's direct access to the bucket, past every mount: which objects are there, and is their content right?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.payload import BLOCK, HEADER, check_file, check_part
from tests.servers import Server, boto_client

BUCKET = "bench"
POLL_S = 0.02
SAMPLES = 16


class NotInS3(Exception):
    """What was written is missing from the bucket or wrong there; the text says which."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: when the bucket was seen to be right, as time.monotonic(). late: it was not yet right at the first look."""

    at: float
    late: bool


class Bucket:
    """The bench's bucket, accessed with boto3."""

    def __init__(self, server: Server) -> None:
        self._client: Any = boto_client(server)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of each object below a prefix, by key without the prefix; folders' markers end with '/'."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {
            found["Key"].removeprefix(prefix): found["Size"] for page in pages for found in page.get("Contents", ())
        }

    def wait(self, right: Callable[[], bool], began: float, limit_s: float) -> Arrival | None:
        """Poll until right(); return None after limit_s seconds. began: the time to report if it is true at once."""
        if right():
            return Arrival(began, late=False)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if right():
                return Arrival(time.monotonic(), late=True)
        return None

    def check_big(self, key: str, size: int) -> None:
        """Check the start of about SAMPLES of a large object's MiB. Errors: WrongContent."""
        for number in range(0, size // BLOCK, max(1, size // BLOCK // SAMPLES)):
            start = number * BLOCK
            check_part(start, self._get(key, f"bytes={start}-{start + 2 * HEADER - 1}")[:HEADER], key)

    def check_small(self, prefix: str, count: int, size: int) -> None:
        """Check about SAMPLES of many small objects. Errors: WrongContent."""
        for number in range(0, count, max(1, count // SAMPLES)):
            key = f"{prefix}/f{number:05}"
            check_file(number, self._get(key), size, key)

    def remove(self, prefix: str) -> None:
        """Delete a prefix with all objects below it; folders go after their content, as versitygw requires."""
        keys = sorted((prefix + name for name in self.sizes(prefix)), reverse=True)
        for first in range(0, len(keys), 1000):
            wanted = [{"Key": key} for key in keys[first : first + 1000]]
            self._client.delete_objects(Bucket=BUCKET, Delete={"Objects": wanted, "Quiet": True})

    def _get(self, key: str, wanted: str = "") -> bytes:
        options = {"Range": wanted} if wanted else {}
        body: bytes = self._client.get_object(Bucket=BUCKET, Key=key, **options)["Body"].read()
        return body
