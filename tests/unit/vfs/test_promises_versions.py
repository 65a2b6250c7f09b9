"""What holds for open files that another client replaces (docs/SEMANTICS.md): two mounts of one bucket."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from datastore.errors import Unsupported
from datastore.fuse.ops import ROOT_INO, OpenRequest
from datastore.fuse.store.base import Body, Capabilities, ETag, ObjectInfo, PartNumber, WriteOptions, WriteResult
from datastore.fuse.vfs.tree import growth
from tests.driving import resolve
from tests.faulty import Fault, Plan, no_faults
from tests.localfs import ME, File
from tests.mounted import Client, World, failing, pattern, taken_over
from tests.promises import promise

BOTH_LISTINGS = True

SIZE = 9 << 20
"""More than is fetched in one piece, so that a client holds a part."""


def write_and_close(file: File) -> None:
    """The second fails where the first does not."""
    file.write(b"mine", 0)
    file.close()


@promise("S-30")
@pytest.mark.parametrize("body", [b"n" * SIZE, None])
def test_an_open_file_stays_on_its_version(world: World, one: Client, body: bytes | None) -> None:
    """Bytes of two versions never meet in one read: what is not held is ESTALE, a new open reads what is there now."""
    world.put("f", b"o" * SIZE)
    with one.local.opened("f") as file:
        assert file.read(0, 4096) == b"o" * 4096
        world.tool.delete("f") if body is None else world.put("f", body)
        world.later()
        for _ in range(2):
            assert file.read(0, 4096) == b"o" * 4096
            failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
            assert one.local.exists("f") == (body is not None)
            assert body is None or one.local.read("f") == body


@promise("S-66")
@pytest.mark.parametrize("size", [1000, SIZE])
@pytest.mark.parametrize("said", [0.5, 2])
def test_a_size_that_the_store_told_wrong_is_noticed_by_the_first_read(
    world: World, one: Client, size: int, said: float
) -> None:
    """Versitygw may tell the ETag of one version with the size of another one, while somebody writes the object."""
    world.put("f", pattern(size))
    lies = [int(size * said)]

    def lie(info: ObjectInfo) -> ObjectInfo:
        return info._replace(size=lies.pop()) if lies else info

    one.faulty.plan = lambda _, method: Fault(alter=lie) if method == "head" else None
    with one.local.opened("f") as file:
        file.read(0, 100)
        assert file.read() == pattern(size)
        assert lies or (file.ino, -1) in one.kernel.inodes


@promise("S-23", "S-30")
@pytest.mark.parametrize("how", ["unlink", "rename"])
@pytest.mark.parametrize("size", [3000, 300_000])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_who_removes_an_open_file_that_another_client_has_just_replaced(
    world: World, one: Client, how: str, size: int, flags: int
) -> None:
    """What was open, of a small file or of a large one, can't be kept any more; its name goes anyway."""
    one.keep_small_copies_only(100_000)
    world.put("f", b"o" * size)
    world.put("g", b"of g")
    with one.local.opened("f", flags) as file:
        one.local.listdir()
        world.put("f", b"theirs")
        one.local.unlink("f") if how == "unlink" else one.local.rename("g", "f")
        failing(errno.ESTALE, file.read, 0, 100)
        one, (file,) = taken_over(one, file)
        failing(errno.ESTALE, file.read, 0, 100)
    assert world.contents() == ({"g": b"of g"} if how == "unlink" else {"f": b"of g"})
    one.nothing_left()


@promise("S-30")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_read_that_finds_a_replacement_shows_it_to_the_next_open(world: World, one: Client, flags: int) -> None:
    """Also while the old file is open, and within the time for which its name is believed."""
    world.put("f", b"o" * SIZE)
    one.local.listdir()
    before = one.local.open("f", flags)
    world.put("f", b"of another size")
    file = one.local.open("f")
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    assert one.local.read("f") == b"of another size"
    file.close()
    before.close()


@promise("S-31")
@pytest.mark.parametrize("size", [100, 200_000])
def test_an_object_that_grew_is_followed(world: World, one: Client, size: int) -> None:
    """As tail -f and TensorBoard need: the handle reads what was appended; what is merely longer is another version."""
    log = os.urandom(size)
    world.put("log", log)
    with one.local.opened("log") as file:
        assert file.read() == log
        for line in (b"second line\n", b"third line\n"):
            log += line
            world.put("log", log)
            world.later()
            assert one.local.stat("log").size == file.stat().size == len(log)
            assert file.read() == log
        assert one.local.stat("log").ino == file.ino
        world.put("log", b"b" * 2 * len(log))
        world.later()
        assert one.local.read("log") == b"b" * 2 * len(log)
        assert file.read(0, size) == log[:size]


@promise("S-31", "S-162")
@pytest.mark.parametrize("listed", [False, True])
def test_who_has_an_object_open_for_writing_does_not_follow_it(world: World, one: Client, listed: bool) -> None:
    """The kernel appends at the end that it knows: the others' bytes would be replaced there."""
    world.put("log", b"first\n")
    file = one.local.open("log", os.O_RDWR | os.O_APPEND)
    assert file.read() == b"first\n"
    world.put("log", b"first\ntheirs\n")
    world.later()
    if listed:
        one.local.listdir()
    assert file.stat().size == 6
    file.write(b"ours\n", 6)
    failing(errno.ESTALE, file.close)
    assert world.body("log") == b"first\ntheirs\n"


def appending(world: World, key: str, lines: list[bytes]) -> Plan:
    """A plan by which another client appends the next of these lines just before each GET, until none is left."""
    one_at_a_time = threading.Lock()  # several lanes may ask at once

    def plan(_: int, method: str) -> None:
        with one_at_a_time:
            if method == "get" and lines:
                world.put(key, world.body(key) + lines.pop(0))

    return plan


@promise("S-31")
@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("size", [100, 200_000])
def test_an_object_that_grows_again_meanwhile_is_followed(world: World, one: Client, size: int, walks: bool) -> None:
    """A log to which another client appends just while this one looks at the growth before."""
    log, more = os.urandom(size), [b"third line\n", b"fourth line\n"]
    world.put("log", log)
    with one.local.opened("log") as file:
        assert file.read() == log
        world.put("log", log + b"second line\n")
        world.later()
        one.faulty.plan = appending(world, "log", more)
        if walks:
            one.local.listdir()
        assert one.local.stat("log").ino == file.ino
        assert not more, "it grew again meanwhile"
        assert file.read() == world.body("log")
        world.later()
        one.local.listdir()
        assert one.local.stat("log").ino == file.ino


@promise("S-31")
@pytest.mark.parametrize("grows", [False, True])
def test_growth_that_another_call_saw_first_is_followed(world: World, one: Client, grows: bool) -> None:
    """While one listing is taken in, an open looks at a file of it. grows: and finds a version newer than listed."""
    logs = {"a": b"first line\n", "b": b"first line\n"}
    for name, log in logs.items():
        world.put(name, log)

    def looks(_: int, method: str) -> None:
        if method == "get":
            one.faulty.plan = no_faults
            world.later(0.01)
            if grows:
                logs["b"] += b"third line\n"
                world.put("b", logs["b"])
            one.local.open("b", os.O_WRONLY).close()

    with one.local.opened("a") as first, one.local.opened("b") as second:
        assert first.read() == second.read() == b"first line\n"
        for name in logs:
            logs[name] += b"second line\n"
            world.put(name, logs[name])
        world.later()
        one.faulty.plan = looks
        one.local.listdir()
        assert one.faulty.plan is no_faults
        assert one.local.stat("b").ino == second.ino
        assert [first.read(), second.read()] == [logs["a"], logs["b"]]


@promise("S-32")
def test_the_last_close_wins_whole(world: World, one: Client, other: Client) -> None:
    """Two who write one file anew: never a mixture."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for _ in range(2):  # it is not there, and it is
        first, second = one.local.open("f", flags), other.local.open("f", flags)
        first.write(b"1" * 50, 0)
        second.write(b"2" * 70, 0)
        first.close()
        assert world.body("f") == b"1" * 50
        second.close()
        assert world.body("f") == b"2" * 70
    world.later()
    assert one.local.read("f") == other.local.read("f") == b"2" * 70


@promise("S-162", "S-32")
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
@pytest.mark.parametrize("new", [False, True])
def test_who_changes_a_part_replaces_nothing(world: World, one: Client, other: Client, flags: int, new: bool) -> None:
    """Never a mixture, and no bytes of either are lost: the second close is ESTALE, its bytes are kept."""
    flags |= os.O_CREAT if new else 0
    if not new:
        world.put("f", b"0" * 100)
    first, second = one.local.open("f", flags), other.local.open("f", flags)
    first.write(b"1" * 50, 0)
    second.write(b"2" * 50, 50)
    first.close()
    won = world.body("f")
    assert won.startswith(b"1" * 50)
    failing(errno.ESTALE, second.close)
    assert world.body("f") == won
    world.later()
    assert one.local.read("f") == other.local.read("f") == won
    (row,) = other.fs.uploads.unsent()
    assert (row["path"], row["stuck"], row["bytes"]) == ("f", True, 100)
    with other.local.opened("f", os.O_WRONLY | os.O_APPEND) as again:
        again.write(b"3", len(won))
    assert world.body("f") == won + b"3"


@promise("S-161", "S-162")
def test_what_this_mount_made_a_moment_ago_is_not_asked_for(world: World, one: Client) -> None:
    """Nothing is asked for at the open; what another client closed is not replaced all the same."""
    one.local.write("f", b"ours")
    asked = one.calls("head", "list_page")
    with one.local.opened("f", os.O_WRONLY | os.O_APPEND) as file:
        file.write(b", ours", 4)
    assert world.body("f") == b"ours, ours"
    world.put("f", b"theirs")
    file = one.local.open("f", os.O_WRONLY | os.O_APPEND)
    assert one.calls("head", "list_page") == asked
    file.write(b", ours", 10)
    failing(errno.ESTALE, file.close)
    assert world.body("f") == b"theirs"
    assert [row["path"] for row in one.fs.uploads.unsent()] == ["f"]


@promise("S-161")
def test_nothing_is_asked_for_while_there_are_unsent_changes(world: World, one: Client) -> None:
    """However old they are: who opens the file to write goes on from them."""
    first = one.local.open("f", os.O_RDWR | os.O_CREAT)
    first.write(b"ours")
    world.later()
    asked = one.calls("head", "list_page")
    request, node = OpenRequest(flags=os.O_WRONLY | os.O_APPEND), first.ino
    resolve(one.fs.release(node, resolve(one.fs.open(ME, node, request)).fh))
    assert one.calls("head", "list_page") == asked
    first.close()
    assert world.body("f") == b"ours"


@promise("S-161")
@pytest.mark.parametrize("how", ["create", "rename"])
def test_a_file_does_not_hide_what_another_client_has_just_put_below_its_name(
    world: World, one: Client, how: str
) -> None:
    """On a server that can't have both (MinIO), the objects below would be out of reach."""
    world.bucket.capabilities = Capabilities(hides_below_files=True)
    one.local.write("f", b"f")
    one.local.listdir()
    world.put("g/below", b"theirs")
    failing(errno.EISDIR, *((one.local.write, "g", b"") if how == "create" else (one.local.rename, "f", "g")))
    assert world.contents() == {"f": b"f", "g/below": b"theirs"}
    assert one.local.read("g/below") == b"theirs"


@promise("S-161")
def test_a_create_opens_what_another_client_has_made(world: World, one: Client) -> None:
    """The kernel believes that nothing is there: what is there is opened, and only O_TRUNC empties it."""
    one.local.listdir()
    for name, flag, size in (("appended", os.O_APPEND, 6), ("emptied", os.O_TRUNC, 0)):
        world.put(name, b"theirs")
        request = OpenRequest(flags=os.O_WRONLY | os.O_CREAT | flag)
        entry, reply = resolve(one.fs.create(ME, ROOT_INO, name.encode(), 0o100644, request))
        assert entry.attr is not None
        assert entry.attr.size == size
        resolve(one.fs.release(entry.attr.ino, reply.fh))
    world.put("link.rclonelink", b"target")
    request = OpenRequest(flags=os.O_WRONLY | os.O_CREAT)
    failing(errno.ESTALE, resolve, one.fs.create(ME, ROOT_INO, b"link", 0o100644, request))
    assert world.body("appended") == b"theirs"


@promise("S-162")
def test_a_touch_gives_way_to_what_another_client_closed_meanwhile(world: World, one: Client) -> None:
    """Nothing was written: the close succeeds, and the file is the other one's."""
    touched = one.local.open("f", os.O_WRONLY | os.O_CREAT)
    world.put("f", b"theirs")
    touched.close()
    assert world.body("f") == b"theirs"
    assert one.local.read("f") == b"theirs"
    assert one.fs.uploads.unsent() == []
    kept = one.local.open("g", os.O_WRONLY | os.O_CREAT)
    world.put("g", b"theirs")
    kept.fsync()
    kept.write(b", ours", 6)
    kept.close()
    assert world.body("g") == b"theirs, ours"


def without_conditions(client: Client, *, uploads: bool = True) -> list[str]:
    """Have the client's store refuse If-Match and If-None-Match, or each upload. Return the keys for which it does."""
    refused, put = list[str](), client.faulty.put

    async def refuse(key: str, body: Body, options: WriteOptions) -> WriteResult:
        if options.if_none_match or options.if_match is not None or not uploads:
            refused.append(key)
            raise Unsupported("the server does not know this operation")
        return await put(key, body, options)

    client.faulty.put = refuse  # type: ignore[method-assign]
    return refused


@promise("S-162", "S-47")
def test_a_store_without_conditions_replaces_nothing_with_conflict_fail(world: World) -> None:
    """It can't tell who was first: each close fails, and what was written is kept here."""
    client = world.client(conflict="fail")
    without_conditions(client)
    file = client.local.open("f", os.O_WRONLY | os.O_CREAT)
    file.write(b"ours")
    failing(errno.EOPNOTSUPP, file.close)
    assert world.all_keys() == []
    (kept,) = client.fs.core.staging_dir.iterdir()
    assert kept.read_bytes() == b"ours"


@promise("S-162")
def test_a_store_without_conditions_gets_uploads_without_them(world: World, one: Client) -> None:
    """A server that refuses If-Match and If-None-Match gets the upload without, and is asked so once."""
    refused = without_conditions(one)
    for name in ("a", "b"):
        with one.local.opened(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(b"ours")
        assert world.body(name) == b"ours"
    assert refused == ["a"]


@promise("S-162")
def test_a_store_without_uploads_is_asked_once(one: Client) -> None:
    """That it refuses an upload without conditions does not mean that it knows none."""
    refused = without_conditions(one, uploads=False)
    failing(errno.EOPNOTSUPP, one.local.write, "f", b"ours")
    assert refused == ["f"]


@promise("S-32")
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("begun", ["before", "after"])
def test_the_last_writer_of_the_whole_file_wins(world: World, one: Client, noticed: bool, begun: str) -> None:
    """The one that closes last wins, also if it saw meanwhile that the object was replaced."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    file.truncate(0)
    file.write(b"mine")
    if begun == "after":
        file.fsync()
    world.later()
    world.put("f", b"theirs, which is longer")
    world.later()
    if noticed:
        one.local.listdir()
        one.local.stat("f")
    file.write(b"mine, all of it")
    file.close()
    assert world.body("f") == b"mine, all of it"
    world.later()
    assert one.local.read("f") == b"mine, all of it"
    assert one.fs.uploads.unsent() == []


@promise("S-32")
def test_the_close_of_a_file_that_another_client_removed_makes_it_again(world: World, one: Client) -> None:
    """Its close makes the file again."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    file.write(b"new", 0)
    world.tool.delete("f")
    world.later()
    assert one.local.listdir() == [b"f"]
    file.close()
    assert world.body("f") == b"new"


@promise("S-32", "S-58")
@pytest.mark.parametrize("content", [b"new", b""])
def test_a_file_written_anew_after_its_removal_is_made_again(world: World, one: Client, content: bytes) -> None:
    """Its close makes the file again, though it had written nothing when the removal was seen; also at a new server."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    world.tool.delete("f")
    world.later()
    assert one.local.listdir() == []
    file.truncate(0)
    if content:
        file.write(content, 0)
    one, (file,) = taken_over(one, file)
    file.close()
    assert world.body("f") == one.local.read("f") == content


@promise("S-32")
@pytest.mark.parametrize("whole", [True, False])
def test_a_replaced_files_writer_keeps_another_programs_bytes(world: World, one: Client, whole: bool) -> None:
    """Another client replaced its file, and somebody here has changed the new one: these bytes are not replaced."""
    world.put("f", b"old")
    file = one.local.open("f", os.O_RDWR)
    world.put("f", b"theirs, which is longer")
    world.later()
    one.local.listdir()
    with one.local.opened("f", os.O_RDWR) as newer:
        newer.write(b"THEIRS", 0)
        failing(errno.ESTALE, lambda: file.truncate(0) if whole else write_and_close(file))
    assert world.body("f") == b"THEIRS, which is longer"


@promise("S-33")
@pytest.mark.parametrize("noticed", [False, True])
def test_a_close_is_estale_whose_unchanged_part_is_gone(world: World, one: Client, noticed: bool) -> None:
    """Close is ESTALE; what was written stays in staging and is listed; the name shows theirs.

    What is written when the replacement was noticed is refused then, or by the close: that never just returns 0.
    """
    world.put("f", b"o" * SIZE)
    file = one.local.open("f", os.O_RDWR)
    if not noticed:
        file.write(b"mine", 0)
    world.put("f", b"n" * SIZE)
    world.later()
    if noticed:
        one.local.listdir()
        failing(errno.ESTALE, write_and_close, file)
    else:
        failing(errno.ESTALE, file.close)
        (row,) = one.fs.uploads.unsent()
        assert row["path"] == "f"
        assert "another client" in str(row["error"])
        (kept,) = one.fs.core.staging_dir.iterdir()
        assert kept.read_bytes()[:4] == b"mine"
    assert world.body("f") == one.local.read("f") == b"n" * SIZE


MIB = 1 << 20
FIRST = b"first line, not short"


@promise("S-147")
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("body", [FIRST + b" and more", FIRST[::-1]])
def test_a_handle_that_gave_no_byte_has_the_new_version(world: World, one: Client, body: bytes, noticed: bool) -> None:
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
def test_a_handle_stays_on_its_version_if_the_new_one_has_another_size(world: World, one: Client, body: bytes) -> None:
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


@promise("S-147", "S-31")
def test_growth_that_goes_on_is_followed_by_who_has_read_nothing(world: World, one: Client) -> None:
    """The log is appended to again while this mount looks at the growth before."""
    log, more, at = pattern(9 * MIB), [b"second line\n", b"third line\n"], 5 * MIB
    world.put("log", log)
    with one.local.opened("log") as file:
        one.faulty.plan = appending(world, "log", more)
        # A read at the beginning would be read ahead of: more than one GET.
        assert bytes(file._call.read(file.ino, file._fh, at, 4096)) == log[at : at + 4096]
        assert not more
        assert file.read() == world.body("log")


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
def test_growth_is_looked_into_up_to_a_size(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond, or where the ETag is that of parts, nobody can say it; nor is what begins otherwise followed."""
    body = pattern(17 * MIB)
    world.put("other", body)
    with one.local.opened("other") as file:
        put_in_parts(world, "other", b"!" + body[1:] + b"more", [16 * MIB])
        failing(errno.ESTALE, resolved, one, file, 4096)
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


@promise("S-147", "S-30", "S-41")
@pytest.mark.parametrize("restarted", [False, True])
def test_who_opens_what_others_have_read_stays_with_them(world: World, one: Client, restarted: bool) -> None:
    """The kernel kept pages of the old version from an earlier open; a new server does not know what was read."""
    world.put("f", b"o" * SIZE)
    file = one.local.open("f")
    assert file.read(0, 4096) == b"o" * 4096
    if restarted:
        _, (file,) = taken_over(one, file)
    else:
        file.close()
        file = one.local.open("f")
    world.put("f", b"n" * SIZE)
    world.later()
    failing(errno.ESTALE, file.read, SIZE - 4096, 4096)
    assert restarted or file.read(0, 4096) == b"o" * 4096


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
    failing(errno.ESTALE, write_and_close, file)
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
