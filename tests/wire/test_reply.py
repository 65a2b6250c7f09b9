"""reply.py and negotiate.py: what is encoded says what was meant, read back with layouts written out here."""

from __future__ import annotations

import stat
import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.kernel import abi, reply
from datastore.fuse.kernel.negotiate import init_reply, negotiate
from datastore.fuse.kernel.wire import InitRequest
from datastore.fuse.ops import Attr, AttrReply, DirEntry, Entry, Ino, StatFs

ATTR = Attr(Ino(7), stat.S_IFREG | 0o640, 1025, 1, 11, 12, 1_500_000_001, -1, 3_000_000_007)
ENTRY = Entry(ATTR, 1.5, 0.25)
ENTRY_BYTES = struct.pack("<4Q2I", 7, 0, 1, 0, 500_000_000, 250_000_000)
ATTR_BYTES = struct.pack(
    "<3Q3q10I", 7, 1025, 3, 1, -1, 3, 500_000_001, 999_999_999, 7, stat.S_IFREG | 0o640, 1, 11, 12, 0, 4096, 0
)


def joined(frame: Sequence[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(bytes(part) for part in frame)


def test_an_entry_carries_sub_second_times_to_live_and_nanoseconds() -> None:
    assert reply.entry(5, ENTRY) == struct.pack("<IiQ", 144, 0, 5) + ENTRY_BYTES + ATTR_BYTES


def test_a_negative_entry_has_node_id_0_and_its_time_to_live() -> None:
    frame = reply.entry(5, Entry(None, 2.5))
    assert len(frame) == 144
    assert struct.unpack_from("<4Q2I", frame, 16) == (0, 0, 2, 0, 500_000_000, 0)


def test_attributes_and_errors_have_the_kernels_shape() -> None:
    expected = struct.pack("<IiQQII", 120, 0, 5, 3, 0, 0) + ATTR_BYTES
    assert reply.attributes(5, AttrReply(ATTR, 3.0)) == expected
    assert reply.error(1 << 63 | 5, 2) == struct.pack("<IiQ", 16, -2, 1 << 63 | 5)


def test_blocks_are_those_of_the_disk_where_they_are_known() -> None:
    """And by the size where not."""
    assert [ATTR._replace(used=used).blocks() for used in (None, 0, 1, 512, 4096)] == [3, 0, 1, 1, 8]
    frame = reply.attributes(5, AttrReply(ATTR._replace(used=4096), 3.0))
    assert struct.unpack_from("<3Q", frame, 32) == (7, 1025, 8)


def test_a_created_file_answers_with_entry_and_handle() -> None:
    frame = reply.created(5, ENTRY, 77, 2, 0)
    assert frame == struct.pack("<IiQ", 160, 0, 5) + ENTRY_BYTES + ATTR_BYTES + struct.pack("<QIi", 77, 2, 0)


def test_statfs_offers_all_free_blocks_to_everyone() -> None:
    frame = reply.statfs(5, StatFs(100, 60, 10, 6))
    assert struct.unpack_from("<5Q4I", frame, 16) == (100, 60, 60, 10, 6, 4096, 255, 4096, 0)
    assert len(frame) == 96


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=30), st.booleans(), st.integers(0, 8192))
def test_a_listing_fits_the_callers_buffer_and_reads_back(names: list[bytes], plus: bool, size: int) -> None:
    budget = reply.Budget(size, plus=plus)
    lines = []
    for number, name in enumerate(names):
        if not budget.take(len(name)):
            break
        lines.append(DirEntry(name, Ino(number + 2), stat.S_IFDIR, number + 1, ENTRY if number % 2 else None))
    encode = reply.directory_plus if plus else reply.directory
    body = joined(encode(5, lines))[16:]
    assert len(body) <= size
    assert [line.name for line in lines] == list(read_back(body, plus=plus))


def read_back(body: bytes, *, plus: bool) -> list[bytes]:
    names, at = [], 0
    while at < len(body):
        at += 128 * plus
        _, _, length, kind = struct.unpack_from("<QQII", body, at)
        assert kind == stat.S_IFDIR >> 12
        names.append(body[at + 24 : at + 24 + length])
        at += 24 + length + (-(24 + length) & 7)
    return names


def test_notifications_have_unique_0_and_their_code() -> None:
    assert reply.inval_inode(7, -1) == struct.pack("<IiQQqq", 40, 2, 0, 7, -1, 0)
    assert reply.inval_entry(1, b"ab", expire_only=True) == struct.pack("<IiQQII", 35, 3, 0, 1, 2, 1) + b"ab\0"
    assert reply.resend() == struct.pack("<IiQ", 16, 7, 0)


@given(st.floats(allow_nan=False))
def test_any_time_to_live_fits_its_fields(ttl_s: float) -> None:
    seconds, nanoseconds = struct.unpack_from("<QI", reply.attributes(1, AttrReply(ATTR, ttl_s)), 16)
    assert 0 <= seconds <= 10**9
    assert 0 <= nanoseconds < 10**9


def test_init_settles_on_what_both_know() -> None:
    offer = InitRequest(60, 131072, abi.ASYNC_READ | 1 << 16 | abi.MAX_PAGES | abi.PASSTHROUGH)
    settled = negotiate(offer)
    assert (settled.minor, settled.max_pages, settled.max_write) == (45, 256, 1 << 20)
    assert settled.flags == abi.ASYNC_READ | abi.MAX_PAGES | abi.PASSTHROUGH
    frame = init_reply(2, settled)
    flags, flags2, depth = (struct.unpack_from("<I", frame, 16 + at)[0] for at in (12, 32, 36))
    assert (flags | flags2 << 32, depth) == (settled.flags, 1)
