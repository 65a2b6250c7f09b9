"""What a new server of a live mount goes on with (docs/SEMANTICS.md, The mount, S-41, S-58)."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from typing import Any

import pytest

from datastore.fuse.ops import Fh, Ino, OpenRequest
from datastore.fuse.state.nodelog import NodeLog
from datastore.fuse.state.removed import RemovedFiles
from datastore.fuse.state.statedb import StateDb
from datastore.fuse.vfs.change.renames import NOREPLACE
from datastore.fuse.vfs.upload import copies
from tests.driving import resolve
from tests.faulty import Plan, from_nth, no_faults
from tests.kernelkeeps import Room
from tests.localfs import ME, File, LocalFs
from tests.mounted import DOWN, Client, Died, World, dies_at, failing, lived, pattern, refuse_writes, taken_over
from tests.patience import PATIENCE_S
from tests.promises import promise


@pytest.fixture
def client(world: World) -> Client:
    return world.client()


@promise("S-41")
def test_a_new_server_gives_no_handle_that_an_old_one_gave(world: World, client: Client) -> None:
    """An old handle that meant another file would read and write that."""
    world.put("a", b"of a")
    world.put("b", b"of b")
    again, (old,) = taken_over(client, client.local.open("a"))
    new = again.local.open("b")
    assert new._fh != old._fh
    assert (old.read(), new.read()) == (b"of a", b"of b")


@promise("S-58")
def test_an_open_for_writing_that_outlives_two_servers_is_sent_back_once(world: World, client: Client) -> None:
    """Linux looks the name up again only once: who was sent back by a server that died is let in by the next one."""
    world.put_all("fg")
    f, g = (client.local.stat(name).ino for name in "fg")
    writes = OpenRequest(flags=os.O_RDWR)

    def sent_back(client: Client, ino: Ino) -> None:
        failing(errno.ESTALE, lambda: resolve(client.fs.open(ME, ino, writes)))

    client, _ = taken_over(client)
    sent_back(client, f)
    client, _ = taken_over(client)
    sent_back(client, g)
    opened = resolve(client.fs.open(ME, f, writes))
    resolve(client.fs.release(f, opened.fh))
    client, _ = taken_over(client)
    sent_back(client, f)


@promise("S-58")
@pytest.mark.parametrize("size", [1000, 300_000])
def test_a_removed_file_stays_open_over_a_restart(world: World, client: Client, size: int) -> None:
    """With its bytes, of a small file on the disk and of a large one in the bucket; it goes at the last close."""
    client.keep_small_copies_only(100_000)
    world.put("f", pattern(size))
    file = client.local.open("f", os.O_RDWR)
    client.local.unlink("f")
    client, (file,) = taken_over(client, file)
    assert file.read() == pattern(size)
    assert not client.local.exists("f")
    client.local.write("f", b"another")
    client, (file,) = taken_over(client, file)
    assert (file.read(), client.local.read("f")) == (pattern(size), b"another")
    file.close()
    assert world.all_keys() == ["f"]
    assert not list((client.fs.core.staging_dir.parent / "removed").iterdir())


@promise("S-58")
def test_a_file_that_was_created_and_removed_stays_writable_over_a_restart(world: World, client: Client) -> None:
    """As a temporary file."""
    file = client.local.open("tmp", os.O_RDWR | os.O_CREAT)
    file.write(b"before ")
    client.local.unlink("tmp")
    client, (file,) = taken_over(client, file)
    file.write(b"and after", 7)
    client, (file,) = taken_over(client, file)
    assert file.read() == b"before and after"
    file.close()
    assert world.all_keys() == []


@promise("S-58")
@pytest.mark.parametrize("how", ["unlinked after it", "replaced before it"])
def test_an_open_file_that_goes_stays_open_over_a_restart(world: World, client: Client, how: str) -> None:
    """The new server knows that somebody has it open."""
    world.put("f", b"old")
    world.put("g", b"new")
    file = client.local.open("f")
    if how == "replaced before it":
        client.local.rename("g", "f")
    client, (file,) = taken_over(client, file)
    if how == "unlinked after it":
        client.local.unlink("f")
    assert (file.read(), client.local.listdir()) == (b"old", [b"g" if how == "unlinked after it" else b"f"])
    assert client.local.read("g" if how == "unlinked after it" else "f") == b"new"


@promise("S-58")
def test_attributes_survive_a_write_after_a_restart(world: World, client: Client) -> None:
    """Whoever has a file open for writing does not reset its mode."""
    client.local.write("f", b"content")
    client.local.chmod("f", 0o600)
    client, (file,) = taken_over(client, client.local.open("f", os.O_WRONLY))
    file.write(b"C")
    file.close()
    assert world.body("f") == b"Content"
    world.later()
    assert world.client().local.stat("f").mode & 0o777 == 0o600


@promise("S-58")
def test_a_fresh_mount_keeps_nothing_open(world: World, client: Client) -> None:
    """After the death of everything nobody has a file open, and what was kept for that is removed."""
    world.put("f", b"content")
    client.local.open("f")
    client.local.unlink("f")
    again = client.again()
    assert again.fs.core.opens.load() == []
    assert not list((again.fs.core.staging_dir.parent / "removed").iterdir())
    assert not list(again.fs.core.staging_dir.iterdir())


@promise("S-58")
@pytest.mark.parametrize("changed", [False, True], ids=["read", "changed"])
@pytest.mark.parametrize("plan", [no_faults, from_nth(0, DOWN)], ids=["", "the store is down when it starts"])
@pytest.mark.parametrize(("old", "new"), [("d/f", "d/new"), ("d", "e")])
def test_a_rename_that_was_cut_off_goes_on_at_the_new_server(
    world: World, old: str, new: str, changed: bool, plan: Plan
) -> None:
    """At whatever call the server dies: the rename is sent again, and who has the file open goes on with it."""
    mine = ME._replace(request=7)
    place, beside = ("d/new", "d/sub/g") if old == "d/f" else ("e/f", "e/sub/g")
    wanted = b"Content" if changed else b"content"
    for number in range(40):
        top, client = f"top{number}", world.client()
        world.put(f"{top}/d/f", b"content")
        world.put(f"{top}/d/sub/g", b"g")
        file = client.local.open(f"{top}/d/f", os.O_RDWR)
        if changed:
            file.write(b"C")
        client.local.stat(f"{top}/d")
        client.faulty.plan = dies_at(len(client.faulty.calls) + number)
        done = lived(LocalFs(client.fs, mine).rename, f"{top}/{old}", f"{top}/{new}", NOREPLACE)
        client = client.again(resumed=True, plan=plan)
        client.faulty.plan = no_faults
        file = File(client.fs, file.ino, file._fh)
        if not done:
            client.local.scandir(f"{top}/{old}".rpartition("/")[0])
            with contextlib.suppress(FileNotFoundError):  # as the session takes it (kernel/dispatch.py)
                LocalFs(client.fs, mine).rename(f"{top}/{old}", f"{top}/{new}", NOREPLACE)
            assert client.fs.core.db.intents() == [], "no later server begins it again"
            assert not client.local.exists(f"{top}/{old}")
            assert client.local.stat(f"{top}/{place}").ino == file.ino
        client, (file,) = taken_over(client, file)
        assert client.local.stat(f"{top}/{place}").ino == file.ino
        assert file.read() == wanted, f"died at call {number}"
        file.write(b"more", 7)
        file.close()
        found = {key: body for key, body in world.contents().items() if key.startswith(f"{top}/")}
        assert found == {f"{top}/{place}": wanted + b"more", f"{top}/{beside}": b"g"}
        assert client.local.read(f"{top}/{place}") == wanted + b"more"
        if done:
            return
    raise AssertionError("a rename takes fewer calls")


@promise("S-58")
@pytest.mark.parametrize(
    ("old", "new", "anew", "dies_in"),
    [
        ("d/f", "d/new", "d/f", "copy"),
        ("d/f", "d/new", "d/f", "delete"),
        ("d", "e", "d/theirs", "copy"),
        ("d", "e", "d/theirs", "delete_many"),
    ],
)
def test_a_rename_that_a_start_ended_is_not_made_again_when_another_client_uses_the_old_name(
    world: World, client: Client, old: str, new: str, anew: str, dies_in: str
) -> None:
    """The kernel sends the rename again after the other client has written."""
    world.put("d/f", b"content")
    world.put("d/g", b"g")
    mine = ME._replace(request=7)
    dying = LocalFs(client.fs, mine)
    dying.stat("d/f")
    client.faulty.plan = lambda index, method: dies_at(0)(index, method) if method == dies_in else None
    assert not lived(dying.rename, old, new)
    client = client.again(resumed=True)
    world.put(anew, b"theirs")
    world.later()
    LocalFs(client.fs, mine).rename(old, new)
    moved = {"d/new": b"content", "d/g": b"g"} if old == "d/f" else {"e/f": b"content", "e/g": b"g"}
    assert world.contents() == {**moved, anew: b"theirs"}
    assert client.local.read(anew) == b"theirs"
    LocalFs(client.fs, ME._replace(request=8)).rename(anew, "later")
    assert world.body("later") == b"theirs"


def dies(*_: object, **__: object) -> None:
    raise Died


@promise("S-58")
@pytest.mark.parametrize("changed", [False, True], ids=["read", "changed"])
@pytest.mark.parametrize(("owner", "method"), [(StateDb, "moved"), (NodeLog, "append")])
def test_a_rename_that_was_cut_off_before_it_was_written_down_goes_on(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, changed: bool
) -> None:
    """That the new key has the content, or that the node has its new place: the kernel's second request is success."""
    world.put("f", b"content")
    mine, file = ME._replace(request=7), client.local.open("f", os.O_RDWR)
    if changed:
        file.write(b"C")
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, dies)
        assert not lived(LocalFs(client.fs, mine).rename, "f", "new", NOREPLACE)
    client, (file,) = taken_over(client, file)
    LocalFs(client.fs, mine).rename("f", "new", NOREPLACE)
    for _ in range(2):
        assert client.local.stat("new").ino == file.ino
        assert file.read() == (b"Content" if changed else b"content")
        client, (file,) = taken_over(client, file)
    file.write(b"more", 7)
    file.close()
    assert world.contents() == {"new": b"Contentmore" if changed else b"contentmore"}
    client.nothing_left()


@promise("S-58", "S-23")
@pytest.mark.parametrize("opened", [True, False])
def test_what_a_rename_that_was_cut_off_replaces_is_never_sent(world: World, client: Client, opened: bool) -> None:
    """Who has it open goes on with its bytes, also at the server after the next one."""
    world.put("f", b"older")
    world.put("new", b"newer")
    mine, file = ME._replace(request=7), client.local.open("f", os.O_RDWR)
    file.write(b"O")
    if not opened:
        refuse_writes(client)
        failing(errno.EIO, file.close)
    client.local.stat("new")
    client.faulty.plan = lambda index, method: dies_at(0)(index, method) if method == "copy" else None
    assert not lived(LocalFs(client.fs, mine).rename, "new", "f")
    client, (file,) = taken_over(client, file)
    LocalFs(client.fs, mine).rename("new", "f")
    if opened:
        file.write(b"!", 5)
    for _ in range(2 if opened else 0):
        assert (file.read(), client.local.read("f")) == (b"Older!", b"newer")
        client, (file,) = taken_over(client, file)
    if opened:
        file.close()
    assert resolve(client.fs.flush_all()) == []
    assert world.contents() == {"f": b"newer"}
    client.nothing_left()
    assert not list((client.fs.core.staging_dir.parent / "removed").iterdir())


@promise("S-58")
def test_unsent_bytes_below_a_directory_go_on_if_only_its_new_name_was_written_down(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal's row of the file below still has the old key when the server dies."""
    world.put("d/f", b"content")
    file = client.local.open("d/f", os.O_RDWR)
    file.write(b"C")
    monkeypatch.setattr(client.fs.core.db, "record_unsent", dies)
    assert not lived(client.local.rename, "d", "e")
    client, (file,) = taken_over(client, file)
    assert file.read() == b"Content"
    file.write(b"more", 7)
    file.close()
    assert world.contents() == {"e/f": b"Contentmore"}
    client.nothing_left()


@promise("S-58")
@pytest.mark.parametrize(("old", "new"), [("d/f", "d/new"), ("d", "e")])
@pytest.mark.parametrize("changed", [False, True], ids=["read", "changed"])
def test_who_has_a_large_file_open_goes_on_where_a_start_moved_it(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch, old: str, new: str, changed: bool
) -> None:
    """A copy in parts is another version than its source, by its ETag: the file goes on as that one."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    wanted = bytearray(pattern(2000))
    world.put("d/f", bytes(wanted))
    file = client.local.open("d/f", os.O_RDWR)
    if changed and old == "d":
        file.write(b"XXX", 500)
        wanted[500:503] = b"XXX"
    client.faulty.plan = lambda index, method: dies_at(0)(index, method) if method == "create_upload" else None
    assert not lived(client.local.rename, old, new)
    client, (file,) = taken_over(client, file)
    if changed:
        file.write(b"YYY", 1500)
        wanted[1500:1503] = b"YYY"
    assert file.read() == wanted
    file.close()
    assert world.contents() == {"d/new" if old == "d/f" else "e/f": wanted}
    assert resolve(client.fs.flush_all()) == []
    client.nothing_left()


@promise("S-58")
def test_a_dead_server_that_still_locks_the_journal_is_no_obstacle(world: World, client: Client) -> None:
    """The kernel may keep a thread of it, and with that its locks, until the next server answers."""
    file = client.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(b"unsent")
    path = client.fs.core.staging_dir.parent / "state.db"
    client.kill()
    hold = (
        "import sqlite3,sys; c=sqlite3.connect(sys.argv[1]); c.execute('begin immediate'); print(1,flush=True); input()"
    )
    command, pipe = [sys.executable, "-c", hold, str(path)], subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        client, (file,) = taken_over(client, file)
        assert file.read() == b"unsent"
        file.close()
        assert world.body("f") == b"unsent"
    finally:
        holder.communicate("\n", timeout=PATIENCE_S)


@promise("S-58", "S-05")
def test_a_directory_that_is_being_read_goes_on_over_a_restart(world: World, client: Client) -> None:
    """Each name that stays is seen once, although others came and went meanwhile."""
    names = {b"s%03d" % number for number in range(100)}
    world.put_all(f"d/{name.decode()}" for name in names)
    ino = client.local.lookup("d").ino
    fh = resolve(client.fs.opendir(ME, ino)).fh
    seen: list[bytes] = []
    cursor, pieces = 0, 0
    while piece := resolve(client.fs.readdir(ino, fh, cursor, Room(12), False)):
        seen += [line.name for line in piece]
        cursor = piece[-1].offset
        pieces += 1
        client = client.again(resumed=True)
        world.put(f"d/s000-{pieces}")
        world.later()
    assert sorted(name for name in seen if name in names) == sorted(names)
    client.fs.releasedir(ino, fh)
    assert not list((client.fs.core.staging_dir.parent / "listings").iterdir())


@promise("S-58")
@pytest.mark.parametrize("written", [b"", b"\xff\x00older"])
def test_a_directory_whose_names_an_older_server_wrote_otherwise_is_listed_anew(
    world: World, client: Client, written: bytes
) -> None:
    world.put_all(["d/a", "d/b"])
    ino = client.local.lookup("d").ino
    fh = resolve(client.fs.opendir(ME, ino)).fh
    assert len(resolve(client.fs.readdir(ino, fh, 0, Room(3), False))) == 3
    (saved,) = (client.fs.core.staging_dir.parent / "listings").iterdir()
    saved.write_bytes(written)
    client = client.again(resumed=True)
    assert [line.name for line in resolve(client.fs.readdir(ino, fh, 3, Room(12), False))] == [b"b"]
    client.fs.releasedir(ino, fh)


@promise("S-58")
def test_what_a_listing_told_of_is_known_to_the_next_server(world: World, client: Client) -> None:
    """The kernel goes on with the nodes that came with the names (READDIRPLUS), and asks for them by their ids."""
    world.put("d/f", b"content")
    ino = client.local.lookup("d").ino
    fh = resolve(client.fs.opendir(ME, ino)).fh
    told = {line.name: line.ino for line in resolve(client.fs.readdir(ino, fh, 0, Room(12), True)) if line.entry}
    client = client.again(resumed=True)
    assert resolve(client.fs.getattr(told[b"f"], Fh(0))).attr.size == len(b"content")


@promise("S-58")
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_was_renamed_over_another_name_has_that_name_at_the_next_server(
    world: World, client: Client, kind: str
) -> None:
    """Also when the directory around them was renamed in between, and so is in the log of nodes after what is replaced:
    the kernel goes on with the node that was renamed, and asks for it by its id. Of the other one nothing is known.
    """
    local = client.local
    local.mkdir("d")
    for name in ("d/replaced", "moved"):
        local.mkdir(name) if kind == "directory" else local.write(name, name.encode())
    local.rename("d", "e")
    ino, replaced = local.stat("moved").ino, local.stat("e/replaced").ino
    local.rename("moved", "e/replaced")
    local = client.again(resumed=True).local
    attr = resolve(local.fs.getattr(ino, Fh(0))).attr
    assert (attr.size, attr.nlink > 0) == (len(b"moved") if kind == "file" else 0, True)
    assert local.lookup("e/replaced").ino == ino
    failing(errno.ESTALE, lambda: resolve(local.fs.getattr(replaced, Fh(0))))


@promise("S-159", "S-19")
@pytest.mark.parametrize("how", ["unlink", "rename"])
@pytest.mark.parametrize("sent", [True, False])
def test_a_removal_that_fails_after_a_restart_loses_nothing(
    world: World, client: Client, how: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server died while it removed an open file with unsent bytes; asked again, the store says no."""
    world.put("other", b"other")
    if sent:
        world.put("f", b"older")
    file = client.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(b"newest")

    def remove(client: Client) -> None:
        client.local.unlink("f") if how == "unlink" else client.local.rename("other", "f")

    record = RemovedFiles.record

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(RemovedFiles, "record", recorded)
        assert not lived(remove, client)
    client, (file,) = taken_over(client, file)
    client.faulty.plan = from_nth(0, DOWN)
    failing(errno.EIO, remove, client)
    client.faulty.plan = no_faults
    file.write(b"!", 6)
    file.close()
    assert resolve(client.fs.flush_all()) == []
    assert world.body("f") == b"newest!"
    assert world.body("other") == b"other"
    assert not list((client.fs.core.staging_dir.parent / "removed").iterdir())
    assert not list(client.fs.core.staging_dir.iterdir())
