"""What holds for open files of which nobody has read yet when another client replaces them (docs/SEMANTICS.md)."""

from __future__ import annotations

import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from datastore.fuse.store.base import ETag, PartNumber, WriteOptions
from datastore.fuse.vfs.tree import growth
from tests.faulty import Fault, no_faults
from tests.mounted import Client, World, failing, pattern
from tests.promises import promise

SIZE = 9 << 20
"""More than is fetched in one piece, so that a client holds a part."""
FIRST = b"first line, not short"


@promise("S-147")
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("body", [FIRST + b" and more", FIRST[::-1]])
def test_a_handle_that_gave_no_byte_goes_on_with_the_new_version(
    world: World, one: Client, body: bytes, noticed: bool
) -> None:
    """As `tail -F` does: opened, changed by another client, read; from then on it stays (S-30)."""
    world.put("log", FIRST)
    with one.local.opened("log") as file:
        world.put("log", body)
        world.later()
        if noticed:
            assert one.local.stat("log").ino == file.ino
        assert resolved(one, file, len(body)) == body
        world.put("log", body[::-1])
        world.later()
        assert one.local.read("log") == body[::-1]
        assert resolved(one, file, len(body)) == body


@promise("S-147", "S-30")
@pytest.mark.parametrize("body", [b"shorter", b"longer than the first, and another"])
def test_of_another_size_it_stays(world: World, one: Client, body: bytes) -> None:
    """The kernel, and who asked for the size, would take a part of it for the whole, or add zeros."""
    world.put("log", FIRST)
    with one.local.opened("log") as file:
        world.put("log", body)
        world.later()
        failing(errno.ESTALE, resolved, one, file, len(FIRST))
    assert one.local.read("log") == body


def put_in_parts(world: World, key: str, body: bytes, cuts: list[int]) -> None:
    """As another tool, with an ETag of parts."""
    upload = world.tool.create_upload(key, WriteOptions())
    parts = [
        (PartNumber(number), world.tool.upload_part(key, upload, PartNumber(number), body[start:stop]))
        for number, (start, stop) in enumerate(itertools.pairwise([0, *cuts, len(body)]), 1)
    ]
    world.tool.complete_upload(key, upload, parts, WriteOptions())


MIB = 1 << 20


@promise("S-147", "S-31")
@pytest.mark.parametrize("noticed", [False, True])
def test_large_growth_is_followed(world: World, one: Client, noticed: bool) -> None:
    """An ETag of one PUT tells it; from then on as ever."""
    body = pattern(17 * MIB)
    world.put("log", body)
    with one.local.opened("log") as file:
        for more in (b"more", b"more, and more"):
            put_in_parts(world, "log", body + more, [16 * MIB])
            world.later()
            if noticed:
                one.local.listdir()
            assert resolved(one, file, 4096) == body[:4096]
            assert one.local.stat("log").ino == file.ino, "it has its name still, or again"
            assert bytes(file._call.read(file.ino, file._fh, len(body) - 4, 100)) == body[-4:] + more
        assert file.stat().size == len(body + more)


@promise("S-147")
def test_readers_at_once_go_on_together(world: World, one: Client) -> None:
    """The kernel reads ahead: several reads of a handle meet the new version at the same time."""
    body = pattern(9 * MIB)
    world.put("log", body)
    offsets = range(0, MIB, MIB // 8)
    with one.local.opened("log") as file, ThreadPoolExecutor(len(offsets)) as pool:
        world.put("log", body + b"more")
        read = list(pool.map(lambda at: bytes(file._call.read(file.ino, file._fh, at, 4096)), offsets))
    assert read == [body[at : at + 4096] for at in offsets]


@promise("S-147", "S-30")
def test_what_is_longer_and_did_not_grow_is_not_followed(world: World, one: Client) -> None:
    """Large, and another from its first byte on."""
    body = pattern(17 * MIB)
    world.put("log", body)
    with one.local.opened("log") as file:
        put_in_parts(world, "log", b"!" + body[1:] + b"more", [16 * MIB])
        failing(errno.ESTALE, resolved, one, file, 4096)


@promise("S-147")
def test_growth_is_looked_into_up_to_a_size(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond, and where the ETag is that of parts, nobody can say it."""
    monkeypatch.setattr(growth, "UNREAD_CHECK", SIZE - 1)
    world.put("log", b"o" * SIZE)
    put_in_parts(world, "parts", b"o" * SIZE, [7 * MIB])
    for name in ("log", "parts"):
        with one.local.opened(name) as file:
            world.put(name, b"o" * SIZE + b"more")
            failing(errno.ESTALE, resolved, one, file, 4096)


def resolved(client: Client, file: Any, size: int) -> bytes:
    """A read that does not ask for the size first, as the kernel's."""
    return bytes(file._call.read(file.ino, file._fh, 0, size))


@promise("S-147", "S-30")
def test_who_opens_what_others_have_read_stays_with_them(world: World, one: Client) -> None:
    """The kernel kept pages of the old version from an earlier open."""
    world.put("f", b"o" * SIZE)
    with one.local.opened("f") as file:
        assert file.read(0, 4096) == b"o" * 4096
    with one.local.opened("f") as late:
        world.put("f", b"n" * SIZE)
        world.later()
        failing(errno.ESTALE, late.read, SIZE - 4096, 4096)
        assert late.read(0, 4096) == b"o" * 4096


@promise("S-147")
def test_what_was_read_before_the_pages_went_binds_nobody(world: World, one: Client) -> None:
    """The kernel drops the pages at the first open of a new version."""
    world.put("f", b"o" * SIZE)
    assert one.local.read("f") == b"o" * SIZE
    world.put("f", b"n" * SIZE)
    world.later()
    with one.local.opened("f") as file:
        world.put("f", b"m" * SIZE)
        world.later()
        assert file.read(SIZE - 4096, 4096) == b"m" * 4096


@promise("S-147", "S-30")
def test_an_old_version_that_arrives_late_is_not_given_out(world: World, one: Client) -> None:
    """Two handles of one inode: what one of them read of the new version binds both."""
    world.put("f", b"old")
    first, second = one.local.open("f"), one.local.open("f")

    def overtaken(answer: Any) -> Any:
        one.faulty.plan = no_faults
        world.put("f", b"new")
        world.later()
        assert one.local.stat("f").ino == first.ino
        assert resolved(one, second, 3) == b"new"
        return answer

    one.faulty.plan = lambda _, method: Fault(alter=overtaken) if method == "get" else None
    assert resolved(one, first, 3) == b"new"
    first.close()
    second.close()


@promise("S-147", "S-47")
def test_a_writer_keeps_the_version_that_it_opened(world: World) -> None:
    """Nothing was read, but who may write means the version that was there."""
    one = world.client(conflict="fail")
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    world.put("f", b"another")
    world.later()
    assert one.local.stat("f").ino != file.ino

    def write_and_close() -> None:
        file.write(b"mine", 0)
        file.close()

    failing(errno.ESTALE, write_and_close)
    assert world.body("f") == b"another"


@promise("S-147", "S-30")
def test_what_was_unsent_when_it_was_read_binds_as_well(world: World, one: Client) -> None:
    """A reader that saw a truncation before it was sent."""
    world.put("f", b"o" * SIZE)
    with one.local.opened("f") as file:
        assert one.local.stat("f").size == SIZE
        with one.local.opened("f", os.O_WRONLY) as writer:
            writer.write(b"mine", 0)
            assert file.read(0, 4) == b"mine"
        world.put("f", b"another")
        world.later()
        assert one.local.read("f") == b"another"
        assert file.read(0, 4) == b"mine"


@promise("S-147", "S-66")
def test_a_version_that_never_was_is_learned_anew(world: World, one: Client) -> None:
    """A store that told a wrong ETag: nothing of such a version can have been read."""
    world.put("f", b"body")
    wrong = Fault(alter=lambda info: info._replace(etag=ETag("none")))
    one.faulty.plan = lambda _, method: wrong if method == "head" else None
    with one.local.opened("f") as file:
        one.faulty.plan = no_faults
        assert file.read() == b"body"


@promise("S-147", "S-41")
def test_a_file_restored_after_a_death_stays_on_its_version(world: World, one: Client) -> None:
    """A new server does not know what was read: the handle stays."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f")
    assert file.read(0, 4096) == b"o" * 4096
    after = one.again(resumed=True)
    file.__init__(after.fs, file.ino, file._fh)  # type: ignore[misc]
    world.put("f", b"n" * SIZE)
    world.later()
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
