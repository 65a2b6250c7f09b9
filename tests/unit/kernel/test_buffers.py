"""The memory that requests are read into."""

from __future__ import annotations

import ctypes

from datastore.fuse.kernel import abi
from datastore.fuse.kernel.session import new_buffer

SIZE = (1 << 20) + 2 * abi.PAGE_SIZE


def resident(buffer: memoryview) -> set[int]:
    """What mincore(2) says of its pages: 1 for those that are there."""
    pages = (ctypes.c_ubyte * -(-len(buffer) // abi.PAGE_SIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(buffer)), pages) == 0
    return {page & 1 for page in pages}


def test_every_page_of_a_buffer_is_there_before_a_request_is_read() -> None:
    buffer = new_buffer(SIZE)
    assert len(buffer) == SIZE
    assert resident(buffer) == {1}
