"""The content of the workloads' files: every MiB and every small file begins with its number, to detect a wrong one."""

from __future__ import annotations

import random
from collections.abc import Iterator

BLOCK = 1 << 20
HEADER = 8
BODY = random.Random(12).randbytes(BLOCK)


class WrongContent(Exception):
    """The bytes read are not those that were written; the text says where."""


def block(number: int, size: int = BLOCK) -> bytes:
    """The number-th MiB of a large file, or (with its size) the number-th small file."""
    return number.to_bytes(HEADER, "little") + BODY[HEADER:size]


def blocks(size: int) -> Iterator[bytes]:
    """Yield the content of a large file; size is a multiple of BLOCK."""
    return (block(number) for number in range(size // BLOCK))


def check_file(number: int, found: bytes | bytearray | memoryview, size: int, what: str) -> None:
    """Check a whole small file by its length, its number and its last bytes. Errors: WrongContent."""
    tail = bytes(found[size - HEADER : size])
    if len(found) != size or found[:HEADER] != number.to_bytes(HEADER, "little") or tail != BODY[size - HEADER : size]:
        raise WrongContent(f"{what}: {len(found)} bytes that are not file {number} of {size} bytes")


def check_part(offset: int, found: bytes | bytearray | memoryview, what: str) -> None:
    """Check a part of a large file: the number of each MiB that begins in it and the end. Errors: WrongContent."""
    for start in range(-offset % BLOCK, len(found) - HEADER + 1, BLOCK):
        number = (offset + start) // BLOCK
        if found[start : start + HEADER] != number.to_bytes(HEADER, "little"):
            raise WrongContent(f"{what}: MiB {number} begins with {bytes(found[start : start + HEADER]).hex()}")
    end = (offset + len(found)) % BLOCK or BLOCK
    if len(found) >= HEADER and end >= 2 * HEADER and found[-HEADER:] != BODY[end - HEADER : end]:
        raise WrongContent(f"{what}: the bytes before {offset + len(found)} are not what was written")
