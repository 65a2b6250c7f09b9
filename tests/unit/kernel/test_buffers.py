"""The memory that requests are read into."""

from __future__ import annotations

import ctypes

from datastore.fuse.kernel import abi
from datastore.fuse.kernel.buffers import Buffers

SIZE = (1 << 20) + 2 * abi.PAGE_SIZE


def resident(buffer: memoryview) -> set[int]:
    """What mincore(2) says of its pages: 1 for those that are there."""
    pages = (ctypes.c_ubyte * -(-len(buffer) // abi.PAGE_SIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(buffer)), pages) == 0
    return {page & 1 for page in pages}


def test_every_page_of_a_buffer_is_there_before_a_request_is_read() -> None:
    buffers = Buffers(3, SIZE)
    for _ in range(3):
        taken = buffers.take()
        assert len(taken) == SIZE
        assert resident(taken) == {1}


def test_a_buffer_that_was_given_back_is_used_before_another_is_made() -> None:
    buffers = Buffers(3, SIZE)
    first, second = buffers.take(), buffers.take()
    buffers.give_back(second)
    buffers.give_back(first)
    assert buffers.take() is first
    assert buffers.take() is second


def test_there_is_one_more_when_one_was_given_back() -> None:
    buffers = Buffers(1, SIZE)
    only = buffers.take()
    has_one = [buffers.has_one]
    buffers.give_back(only)
    assert [*has_one, buffers.has_one] == [False, True]
    assert buffers.take() is only
