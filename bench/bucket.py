"""The bench's own look into the bucket, beside every mount: what is there, and is it right?"""

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
    """What was written is not (rightly) in the bucket; the text says what is."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the bucket was seen to be right, time.monotonic(). late: it was not so at the first look."""

    at: float
    late: bool


class Bucket:
    """One bucket through boto3."""

    def __init__(self, server: Server) -> None:
        self._client: Any = boto_client(server)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Size of every object below a prefix, without it; markers of directories end with '/'."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {
            found["Key"].removeprefix(prefix): found["Size"] for page in pages for found in page.get("Contents", ())
        }

    def wait(self, right: Callable[[], bool], began: float, limit_s: float) -> Arrival | None:
        """Look until it is right; began: what stands as the time when the first look says so. None: it never was."""
        if right():
            return Arrival(began, late=False)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if right():
                return Arrival(time.monotonic(), late=True)
        return None

    def check_big(self, key: str, size: int) -> None:
        """Some MiB of a large object. Errors: WrongContent."""
        for number in range(0, size // BLOCK, max(1, size // BLOCK // SAMPLES)):
            start = number * BLOCK
            check_part(start, self._get(key, f"bytes={start}-{start + 2 * HEADER - 1}")[:HEADER], key)

    def check_small(self, prefix: str, count: int, size: int) -> None:
        """Some of many small objects. Errors: WrongContent."""
        for number in range(0, count, max(1, count // SAMPLES)):
            key = f"{prefix}/f{number:05}"
            check_file(number, self._get(key), size, key)

    def remove(self, prefix: str) -> None:
        """Everything below a prefix, and the marker itself; folders last, as versitygw wants it."""
        keys = sorted((prefix + name for name in self.sizes(prefix)), reverse=True)
        for first in range(0, len(keys), 1000):
            wanted = [{"Key": key} for key in keys[first : first + 1000]]
            self._client.delete_objects(Bucket=BUCKET, Delete={"Objects": wanted, "Quiet": True})

    def _get(self, key: str, wanted: str = "") -> bytes:
        options = {"Range": wanted} if wanted else {}
        body: bytes = self._client.get_object(Bucket=BUCKET, Key=key, **options)["Body"].read()
        return body
