"""wire.py: requests decode to what they say, or are refused, and nothing makes a decoder raise anything else."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.kernel import abi, wire
from datastore.fuse.kernel.dispatch import operations
from datastore.fuse.kernel.passthrough import OpenModes
from datastore.fuse.ops import NOW, Ino, OpenRequest, SetAttr
from tests.memfs import MemFs
from tests.wire import frames

DECODERS: dict[int, Callable[[memoryview], object]] = {
    opcode: operation.decode
    for opcode, operation in enumerate(operations(MemFs(), OpenModes(-1)))
    if operation is not None
} | {abi.FORGET: wire.forget, abi.BATCH_FORGET: wire.batch_forget, abi.INTERRUPT: wire.interrupt, abi.INIT: wire.init}

MALFORMED = object()


def decode(frame: bytes) -> object:
    (opcode,) = struct.unpack_from("<I", frame, 4)
    try:
        return DECODERS[opcode](memoryview(frame)[abi.HEADER_SIZE :])
    except wire.NOT_A_REQUEST:
        return MALFORMED


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (abi.IN_HEADER, 40),
        (abi.OUT_HEADER, 16),
        (abi.ENTRY_OUT, 128),
        (abi.ENTRY_REPLY, 144),
        (abi.ATTR_REPLY, 120),
        (abi.OPEN_REPLY, 32),
        (abi.STATFS_REPLY, 96),
        (abi.INIT_REPLY, 80),
        (abi.SETATTR_IN, 88),
        (abi.READ_IN, 40),
        (abi.WRITE_IN, 40),
        (abi.BACKING_MAP, 16),
        (abi.DIRENT, 24),
        (abi.INVAL_INODE, 40),
        (abi.INVAL_ENTRY, 32),
    ],
)
def test_layouts_have_the_sizes_of_linux_fuse_h(layout: struct.Struct, size: int) -> None:
    assert layout.size == size


EXPECTED: dict[str, object] = {
    "lookup": (b"name",),
    "forget": 3,
    "getattr": (7,),
    "setattr": (0, SetAttr(mode=0o644, size=100)),
    "readlink": (),
    "symlink": (b"new", b"../a target"),
    "mknod": (b"node", 0o100644, 0),
    "mkdir": (b"dir", 0o755),
    "unlink": (b"gone",),
    "rename": wire.RenameRequest(b"a", Ino(1), b"b", 0),
    "rename2": wire.RenameRequest(b"a", Ino(1), b"b", 1),
    "link": (1000, b"other"),
    "open": (OpenRequest(flags=0o100000),),
    "create": wire.CreateRequest(b"file", 0o100644, OpenRequest(flags=0o102)),
    "read": (0, 0, 4096),
    "write": (0, 5, b"xyz", False),
    "release": (9,),
    "fsync": (9, True),
    "setxattr": (b"user.a", b"vv", 0),
    "getxattr": (64, b"user.a"),
    "listxattr": (0,),
    "removexattr": (b"user.a",),
    "flush": (9,),
    "readdir": (0, 0, 4096),
    "interrupt": 40,
    "batch_forget": [(5, 1), (6, 2)],
    "fallocate": (0, 0, 10, 0),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_recorded_request_decodes_to_its_fields(kind: str) -> None:
    assert decode(frames.VALID[kind]) == EXPECTED[kind]


def test_times_before_1970_and_now_are_understood() -> None:
    valid = abi.FATTR_ATIME | abi.FATTR_MTIME | abi.FATTR_MTIME_NOW | abi.FATTR_CTIME | abi.FATTR_KILL_SUIDGID
    body = struct.pack("<IIQQQqqqIIIIIIII", valid, 0, 0, 0, 0, -2, 5, 7, 500, 6, 8, 0, 0, 0, 0, 0)
    expected = SetAttr(atime_ns=-2 * 10**9 + 500, mtime_ns=NOW, ctime_ns=7 * 10**9 + 8, kill_suidgid=True)
    assert decode(frames.request(abi.SETATTR, body)) == (0, expected)


@pytest.mark.parametrize("name", [b"", b"\0", b"a", b"a/b\0", b".\0", b"..\0", b"a\0b\0"])
def test_a_name_the_kernel_never_sends_is_malformed(name: bytes) -> None:
    assert decode(frames.request(abi.LOOKUP, name)) is MALFORMED


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (abi.WRITE, frames.rw(1, 0, 9) + b"short"),
        (abi.WRITE, frames.rw(1, 0, 2) + b"longer"),
        (abi.WRITE, frames.rw(1, (1 << 63) - 1, 1) + b"x"),
        (abi.READ, frames.rw(1, 1 << 63, 1)),
        (abi.READ, frames.rw(1, 0, 1 << 31)),
        (abi.BATCH_FORGET, struct.pack("<II", 1 << 31, 0)),
        (abi.SETXATTR, struct.pack("<II", 1 << 31, 0) + b"user.a\0"),
        (abi.SYMLINK, b"name\0" + b"t" * 4096 + b"\0"),
        (abi.RENAME2, struct.pack("<QII", 1, 0, 0) + b"a\0b\0c\0"),
    ],
)
def test_lengths_that_contradict_each_other_are_malformed(opcode: int, body: bytes) -> None:
    assert decode(frames.request(opcode, body)) is MALFORMED


@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=300))
def test_no_bytes_make_a_decoder_raise(opcode: int, body: bytes) -> None:
    decode(frames.request(opcode, body))


@given(st.sampled_from(sorted(EXPECTED)), st.data())
def test_every_truncation_is_malformed_or_still_a_request(kind: str, data: st.DataObject) -> None:
    frame = frames.VALID[kind]
    decode(frame[: data.draw(st.integers(40, len(frame)))])


@given(st.binary(min_size=1, max_size=255).filter(lambda b: not set(b) & {0, 47} and b not in (b".", b"..")))
def test_any_name_of_bytes_comes_through(name: bytes) -> None:
    assert decode(frames.request(abi.LOOKUP, name + b"\0")) == (name,)


def test_each_opcode_has_the_name_by_which_we_know_it() -> None:
    known = {name: number for name, number in vars(abi).items() if name in abi.NAMES}
    assert len(known) > 40
    assert {name: abi.opcode_name(number) for name, number in known.items()} == {name: name for name in known}
    assert [abi.opcode_name(number) for number in (7, 19, 52, 53)] == ["7", "19", "STATX", "53"]
