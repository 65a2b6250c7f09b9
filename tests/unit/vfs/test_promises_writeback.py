"""`writeBack`: close returns when the local disk has the file (docs/SEMANTICS.md)."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from datastore.errors import InvalidKey
from datastore.fuse.loop import all_of
from datastore.fuse.ops import ROOT_INO, OpenReply, OpenRequest
from datastore.fuse.vfs.upload import upkeep
from tests.driving import resolve
from tests.faulty import Fault, no_faults
from tests.localfs import ME, File
from tests.mounted import Client, World, failing, fails, pattern, refuse_writes, taken_over
from tests.mounted import world as opened
from tests.patience import eventually
from tests.promises import promise


@pytest.fixture
def one(world: World) -> Client:
    return world.client(write_back_s=5.0)


def send(client: Client, later_s: float = 10.0) -> None:
    """What the background does by then."""
    now = client.fs.core.clock.monotonic() + later_s
    resolve(all_of(client.fs.loop.call(lambda: client.fs.upkeep.send_due(now))))


@promise("S-48")
def test_a_file_whose_name_the_store_refuses_can_be_removed(world: World, one: Client) -> None:
    """It was made, as the store had not been asked yet."""
    one.local.write("refused", b"bytes")
    one.faulty.plan = lambda *_: Fault(InvalidKey("the server refuses this name"))
    send(one)
    assert one.fs.uploads.unsent()
    one.local.unlink("refused")
    one.nothing_left()


@promise("S-48")
@pytest.mark.parametrize("max_delay_s", [0.1, 5.0])
def test_close_returns_before_the_store_has_the_file(world: World, max_delay_s: float) -> None:
    """The bytes and the journal are on the disk; the file is read, listed, and sent within maxDelay; an fsync waits."""
    one = world.client(write_back_s=max_delay_s)
    one.local.write("f", b"bytes")
    assert world.all_keys() == []
    assert one.local.read("f") == b"bytes"
    assert resolve(one.fs.uploads.forget("f")) == 0, "only what could not be sent can be discarded"
    (row,) = one.fs.uploads.unsent()
    assert (row["path"], row["error"]) == ("f", None)
    send(one, max_delay_s / 50)
    assert world.all_keys() == []
    send(one, max_delay_s)
    assert world.body("f") == b"bytes"
    one.nothing_left()
    with one.local.opened("g", os.O_WRONLY | os.O_CREAT) as file:
        file.write(b"bytes")
        file.fsync()
        assert world.body("g") == b"bytes"


@promise("S-58", "S-48")
@pytest.mark.parametrize("how", ["open", "create"])
def test_an_open_that_was_done_and_not_answered_is_done_once(world: World, one: Client, how: str) -> None:
    """The kernel sends it again to the next server, and closes it once: a second writer would hold the upload back."""
    world.put("f", b"older")
    caller, ino = ME._replace(request=8), one.local.stat("f").ino

    def done(client: Client) -> OpenReply:
        request = OpenRequest(flags=os.O_RDWR)
        if how == "open":
            return resolve(client.fs.open(caller, ino, request))
        return resolve(client.fs.create(caller, ROOT_INO, b"new", 0o644, request))[1]

    done(one)
    one, _ = taken_over(one)
    reply = done(one)
    file = File(one.fs, one.local.stat("f" if how == "open" else "new").ino, reply.fh)
    file.write(b"after", 0)
    file.close()
    send(one)
    assert world.contents() == ({"f": b"after"} if how == "open" else {"f": b"older", "new": b"after"})


@promise("S-48")
def test_sending_many_small_files_writes_the_journal_for_many_at_once(world: World, one: Client) -> None:
    """Nothing of them stays: no row of a file that is gone counts, also if the process dies before it is deleted."""
    for number in range(20):
        one.local.write(f"f{number}", b"%d" % number)
    said: list[str] = []
    one.fs.core.db._connection.set_trace_callback(said.append)
    send(one)
    one.fs.core.db._connection.set_trace_callback(None)
    assert len(world.all_keys()) == 20
    assert sum(line.lower().startswith("begin") for line in said) <= 1
    one.nothing_left()
    assert one.fs.core.db.unsent() == []
    assert all(node.staged is None for node in one.fs.core.nodes.by_ino.values())
    one.fs.core.db._forgotten.clear()
    world.put("f0", b"newer, by another client")
    again = one.again()
    again.nothing_left()
    assert again.fs.core.db.unsent() == []
    assert world.body("f0") == b"newer, by another client"


@promise("S-48")
def test_a_file_that_is_opened_while_it_is_sent_reads_and_writes_on(world: World, one: Client) -> None:
    """The staging file goes with the last handle, or with what sends it: whoever comes last."""
    one.local.write("f", b"first")
    with one.local.opened("f", os.O_RDWR) as file:
        (node,) = one.fs.core.nodes.unsent()
        assert resolve(one.fs.uploads.retry_one(node)) == ""
        assert node.staged is not None
        assert file.read(0, 5) == b"first"
        file.write(b"F", 0)
    send(one)
    assert world.body("f") == b"First"
    one.nothing_left()


@promise("S-48", "S-58")
@pytest.mark.parametrize("known", [True, False], ids=["known", "forgotten"])
def test_what_was_closed_is_sent_by_the_next_server(world: World, one: Client, known: bool) -> None:
    """Within maxDelay of its start, whatever the size and the kernel knows, and nothing of it stays here."""
    content = pattern(3 << 20)
    one.local.write("f", content)
    if not known:
        one.fs.core.nodelog.rewrite([])
    one = one.again(resumed=True)
    (row,) = one.fs.uploads.unsent()
    assert row["error"] is None
    send(one, 0.1)
    assert world.all_keys() == []
    send(one, 5.0)
    assert world.body("f") == content
    one.nothing_left()
    assert one.fs.core.db.unsent() == []
    assert one.local.read("f") == content
    assert (one.calls("get") == 0) == known, "what a file had that was closed here is in the cache"


@promise("S-48", "S-58")
@pytest.mark.parametrize("resumed", [False, True])
def test_what_is_closed_is_sent_by_itself(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Also after nothing was closed for a while, and what an earlier server left of a file that the kernel forgot."""
    monkeypatch.setattr(upkeep, "_TICK_S", 3600.0)
    monkeypatch.setattr(upkeep, "_LOOK_S", 0.01)
    if resumed:
        one.local.write("f", b"bytes")
        one.fs.core.nodelog.rewrite([])
        one = one.again(resumed=True)
    one.fs.core.settings = replace(one.fs.core.settings, retry_upload_s=7200.0)
    one.fs.loop.call(one.fs.upkeep.start)
    for name in ("f", "g", "h"):
        if not resumed:
            one.local.write(name, b"bytes")
        one.fs.loop.run(one.fs.loop.sleep(0.05))
        assert name not in world.all_keys()
        world.later()
        eventually(lambda name=name: name in world.all_keys())  # type: ignore[misc]
        eventually(lambda: one.fs.uploads.unsent() == [])
        one.fs.loop.run(one.fs.loop.sleep(0.05))
        resumed = False


@promise("S-32", "S-44", "S-48")
def test_a_closed_file_that_waits_long_is_not_sent_again(world: World, one: Client) -> None:
    """It was sent as one that grows; what another client wrote since stays."""
    one.local.write("f", b"ours")
    world.later(upkeep.QUIET_S)
    resolve(one.fs.upkeep.go_round())
    assert world.body("f") == b"ours"
    world.put("f", b"theirs")
    send(one)
    assert world.body("f") == b"theirs"


@promise("S-48", "S-58")
@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_is_being_written_waits_for_its_close(world: World, one: Client, restarted: bool) -> None:
    """Half of it is never sent, nor an older content; also where it is open for writing at the next server."""
    for number in range(5):
        one.local.write("f", b"%d" % number)
    file = one.local.open("f", os.O_WRONLY | os.O_TRUNC)
    file.write(b"ha")
    if restarted:
        one, (file,) = taken_over(one, file)
    send(one)
    assert world.all_keys() == []
    file.write(b"lf", 2)
    file.close()
    send(one)
    assert world.body("f") == b"half"
    assert one.calls("put") == 1
    one.nothing_left()


@promise("S-48")
def test_names_that_change_before_their_files_are_sent_have_the_right_bytes(world: World, one: Client) -> None:
    """Removed, renamed, replaced, and below a renamed directory."""
    one.local.mkdir("d")
    for name in ("gone", "old", "above", "below", "d/in"):
        one.local.write(name, name.encode())
    one.local.unlink("gone")
    one.local.rename("old", "new")
    one.local.rename("above", "below")
    one.local.rename("d", "e")
    failing(errno.ENOTEMPTY, one.local.rmdir, "e")
    send(one)
    assert world.contents() == {"new": b"old", "below": b"above", "e/in": b"d/in"}
    one.again()
    assert world.all_keys() == ["below", "e/", "e/in", "new"]


@promise("S-48")
def test_exclusive_creation_asks_the_store_later(world: World, one: Client) -> None:
    """Within the mount at once; who is second among clients keeps the bytes here."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    for name in ("mine", "theirs"):
        with one.local.opened(name, flags) as file:
            file.write(b"ours")
    assert one.calls("put") == 0
    failing(errno.EEXIST, one.local.open, "mine", flags)
    again = one.fs.create(ME, ROOT_INO, b"mine", 0o644, OpenRequest(flags=flags))
    failing(errno.EEXIST, resolve, again)
    world.put("theirs", b"theirs")
    send(one)
    assert (world.body("mine"), world.body("theirs")) == (b"ours", b"theirs")
    (row,) = one.fs.uploads.unsent()
    assert (row["path"], row["bytes"], row["stuck"]) == ("theirs", 4, True)
    world.later()
    assert one.local.read("theirs") == b"theirs"
    failing(errno.EEXIST, one.local.open, "theirs", flags)


@promise("S-48", "S-19")
def test_closes_succeed_while_the_store_is_away(world: World, one: Client) -> None:
    """Closes succeed, also later ones, the files are listed with the reason, and go when it is back."""
    refuse_writes(one)
    one.local.write("f", b"bytes")
    send(one)
    (row,) = one.fs.uploads.unsent()
    assert row["error"] == "the server is down"
    with one.local.opened("f", os.O_WRONLY | os.O_APPEND) as file:
        file.write(b", more", 5)
    assert one.local.read("f") == b"bytes, more"
    one.faulty.plan = no_faults
    assert resolve(one.fs.flush_all()) == []
    assert world.body("f") == b"bytes, more"


@promise("S-49")
@pytest.mark.parametrize(("files", "size"), [(3, 1 << 30), (1000, 8)])
def test_a_close_sends_its_file_when_too_much_waits(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, files: int, size: int
) -> None:
    """A close sends its own file then, and tells if it can't."""
    monkeypatch.setattr(upkeep, "MAX_FILES", files)
    monkeypatch.setattr(upkeep, "MAX_BYTES", size)
    for number in range(5):
        one.local.write(f"f{number}", b"1234")
    assert len(one.fs.uploads.unsent()) == (3 if files == 3 else 2)
    refuse_writes(one)
    failing(errno.EIO, one.local.write, "f5", b"1234")
    one.faulty.plan = no_faults
    send(one)
    one.local.write("again", b"1234")
    assert "again" not in world.all_keys()


@promise("S-50")
def test_close_syncs_the_bytes_before_the_journal(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without its bytes would send a hole."""
    synced: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def sync(fd: int) -> None:
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            real(fd)

        monkeypatch.setattr(os, name, sync)

    spy("fsync")
    spy("fdatasync")
    one.local.write("f", b"bytes")
    (row,) = one.fs.uploads.unsent()
    assert synced == [row["staging"], "staging", "state.db-wal"]
    with closing(sqlite3.connect(one.directory / "state" / "state.db")) as journal:
        assert journal.execute("select key from unsent").fetchall() == [("f",)]


@promise("S-50")
def test_a_failed_close_syncs_what_it_keeps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without writeBack what is kept outlives a power cut."""
    client = world.client()
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    client.local.write("well", b"bytes")
    assert synced == []
    refuse_writes(client)
    failing(errno.EIO, client.local.write, "f", b"bytes")
    assert len(synced) == 2


@promise("S-50")
def test_a_full_disk_is_the_writers_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC to who writes; what was accepted before, other files and the mount go on."""
    client = world.client()
    other = client.local.open("other", os.O_RDWR | os.O_CREAT)
    other.write(b"accepted")
    real = os.pwrite
    room = [5000]

    def pwrite(fd: int, body: bytes, offset: int) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        done = real(fd, body[: room[0]], offset)
        room[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    file = client.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(pattern(4096))
    failing(errno.ENOSPC, file.write, pattern(8192), 4096)
    failing(errno.ENOSPC, file.write, b"x", 4096)
    assert file.read() == pattern(4096)
    file.close()
    assert world.body("f") == pattern(4096)
    other.close()
    assert world.body("other") == b"accepted"
    room[0] = 1 << 20
    client.local.write("later", b"bytes")
    assert world.body("later") == b"bytes"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@promise("S-50")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_state_disk_fails_the_writer_and_loses_nothing_accepted(small_disk: Path) -> None:
    """The bytes, or the journal: ENOSPC for the writer, and what was accepted arrives."""
    with opened(small_disk) as world:
        client = world.client()
        accepted = client.local.open("accepted", os.O_RDWR | os.O_CREAT)
        accepted.write(b"bytes")
        file = client.local.open("f", os.O_RDWR | os.O_CREAT)
        failing(errno.ENOSPC, file.write, pattern(4 << 20))
        full = 0
        while not fails(errno.ENOSPC, file.write, pattern(4096), full):
            full += 4096
        made = 0
        while made < 1000 and not fails(errno.ENOSPC, client.local.open, f"n{made}", os.O_WRONLY | os.O_CREAT):
            made += 1
        assert made < 1000
        assert accepted.read() == b"bytes"
        accepted.close()
        assert world.body("accepted") == b"bytes"
        file.truncate(0)
        file.close()
        client.local.write("later", b"bytes")
        assert world.body("later") == b"bytes"
