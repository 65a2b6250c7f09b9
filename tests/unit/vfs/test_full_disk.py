"""What holds when the disk of the state directory is full, and when the machine went down (docs/SEMANTICS.md)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from datastore.fuse.data.staging import StagedFile
from datastore.fuse.state import statedb
from datastore.fuse.state.removed import RemovedFiles
from datastore.fuse.state.rows import Subject
from datastore.fuse.state.statedb import StateDb
from tests.driving import resolve
from tests.faulty import Fault, no_faults
from tests.mounted import DOWN, Client, World, failing, pattern
from tests.promises import promise

MIB = 1 << 20
LARGE = pattern(3 * MIB)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_files() -> list[str]:
    """What this process has open, also where it is removed."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(each))
    return found


def unlink(client: Client) -> None:
    client.local.unlink("f")


def rename_over(client: Client) -> None:
    client.local.rename("g", "f")


@promise("S-50")
@pytest.mark.parametrize("content", [LARGE, LARGE[:9000]], ids=["large", "small"])
def test_a_file_with_unsent_changes_is_read_on_a_full_disk(
    world: World, one: Client, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the local disk lacks of it comes from the store, and is kept nowhere."""
    world.put("f", content)
    changed = content[:5000] + b"changed" + content[5007:]
    with one.local.opened("f", os.O_RDWR) as file:
        file.write(b"changed", 5000)
        with monkeypatch.context() as patched:
            patched.setattr(StagedFile, "put", full)
            assert file.read() == changed
            assert file.read(3000, 4100) == changed[3000:7100]
            assert one.local.read("f") == changed
        assert file.read() == changed
    assert world.body("f") == changed


@pytest.fixture
def removing(world: World, one: Client) -> Client:
    """Removed open files above 1 MiB are kept in the bucket."""
    world.put("f", LARGE)
    world.put("g", b"replacement")
    one.keep_small_copies_only(MIB)
    return one


@promise("S-157")
@pytest.mark.parametrize("how", [unlink, rename_over])
@pytest.mark.parametrize(("owner", "step"), [(RemovedFiles, "record"), (StateDb, "begin")])
def test_a_removal_that_failed_leaves_the_file_where_it_was(
    world: World,
    removing: Client,
    how: Callable[[Client], None],
    owner: type,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is written to it afterwards goes to its name, not to the hidden copy, which the next mount removes."""
    with removing.local.opened("f", os.O_RDWR) as file:
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, full)
            failing(errno.ENOSPC, how, removing)
        file.write(b"later", 0)
    again = removing.again()
    assert world.body("f") == b"later" + LARGE[5:]
    assert again.local.read("g") == b"replacement"
    assert world.all_keys() == ["f", "g"]


@promise("S-157", "S-27")
def test_a_failed_rename_is_not_done_by_the_next_mount(
    world: World, removing: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal had room for its beginning, and none for its end."""
    with removing.local.opened("f", os.O_RDWR) as file:
        with monkeypatch.context() as patched:

            def down(index: int, method: str) -> Fault | None:
                if method != "copy" or removing.fs.core.db.intents()[-1].kind == "discard":
                    return None  # or the copy that keeps what is replaced
                patched.setattr(StateDb, "_transaction", full)
                return Fault(DOWN)

            removing.faulty.plan = down
            failing(errno.EIO, rename_over, removing)
            removing.faulty.plan = no_faults
        file.write(b"later", 0)
    resolve(removing.fs.upkeep.go_round())
    removing.again()
    assert world.body("f") == b"later" + LARGE[5:]
    assert world.body("g") == b"replacement"


@promise("S-157")
def test_a_small_file_whose_removal_failed_is_sent(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for removed there."""
    world.put("f", b"small")
    world.put("g", b"replacement")
    file = one.local.open("f", os.O_RDWR)
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "begin", full)
        failing(errno.ENOSPC, rename_over, one)
    file.write(b"later", 0)
    after = one.again(resumed=True)
    assert resolve(after.fs.flush_all()) == []
    assert world.body("f") == b"later"


@promise("S-27")
def test_a_start_on_a_full_disk_finishes_a_rename(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename is finished, and the mount serves; that it is done is written down by the next start."""
    world.put("f", b"moves")
    one.fs.core.db.begin("rename-file", "f", "to")
    one.kill()
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "_transaction", full)
        again = one.again()
    assert again.local.read("to") == b"moves"
    assert one.again().fs.core.db.intents() == []
    assert world.all_keys() == ["to"]


@promise("S-50")
def test_a_file_without_room_for_its_row_is_not_made(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC to who creates it; of the file nothing is left, and the next server is told of none."""
    core, flags = one.fs.core, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    nodes = set(core.nodes.by_ino)
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "record_unsent", full)
        failing(errno.ENOSPC, one.local.open, "f", flags)
    assert list(core.staging_dir.iterdir()) == []
    assert [path for path in open_files() if path.startswith(f"{core.staging_dir}/")] == []
    assert set(core.nodes.by_ino) == nodes
    core.rewrite_nodelog()
    assert core.nodelog.records == 0
    with one.local.opened("f", flags) as file:
        assert core.nodelog.records == 1
        file.write(b"bytes")
    assert world.body("f") == b"bytes"


Boot = Callable[[], None]


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Boot:
    """Start the machine anew."""
    numbers = iter(range(9))

    def start() -> None:
        number = str(next(numbers))
        monkeypatch.setattr(statedb, "boot_id", lambda: number)

    start()
    return start


@pytest.fixture
def client(boot: Boot, world: World) -> Client:
    return world.client()


def went_down(client: Client, act: Callable[[], None], *, left: int) -> None:
    """What follows reached the store and not the disk, which has so many bytes of each staging file."""
    state = Path(client.spec.state_dir)
    shutil.copytree(state, kept := state.with_name("kept"))
    act()
    client.kill()
    shutil.rmtree(state)
    kept.rename(state)
    for path in (state / "staging").iterdir():
        os.truncate(path, left)


@promise("S-157", "S-18")
@pytest.mark.parametrize(("left", "later"), [(0, 0.0), (3, 1.5)])
def test_what_was_stored_is_not_sent_again_after_a_power_cut(
    world: World, client: Client, boot: Boot, left: int, later: float
) -> None:
    """Closed without an error: the staging file was gone, but the disk had not heard of that."""
    world.put("f", b"older")
    world.later()
    file = client.local.open("f", os.O_RDWR | os.O_TRUNC)
    file.write(b"all")

    def go_on() -> None:
        world.later(later)
        file.write(b" of it", 3)
        file.close()

    went_down(client, go_on, left=left)
    boot()
    again = client.again()
    assert world.body("f") == b"all of it"
    (row,) = again.fs.uploads.unsent()
    assert (row["stuck"], row["path"]) == (True, "f")
    again = again.again(resumed=True).again()
    assert world.body("f") == b"all of it"
    assert resolve(again.fs.uploads.forget("f")) == 1
    assert again.local.read("f") == b"all of it"


@promise("S-20", "S-50")
@pytest.mark.parametrize("orderly", [True, False])
def test_unsent_bytes_are_sent_after_a_power_cut(world: World, client: Client, boot: Boot, orderly: bool) -> None:
    """A reboot after the death of every process, and a power cut after the disk had got all by itself."""
    world.put("f", b"older")
    world.later()
    client.local.open("f", os.O_RDWR | os.O_TRUNC).write(b"all of it")
    client.local.open("new", os.O_RDWR | os.O_CREAT).write(b"this, too")
    if orderly:
        client.kill()
    else:
        went_down(client, lambda: None, left=9)
    boot()
    client.again()
    assert (world.body("f"), world.body("new")) == (b"all of it", b"this, too")


@promise("S-157", "S-27")
def test_a_rename_whose_end_the_disk_does_not_have_is_not_done_again(world: World, client: Client, boot: Boot) -> None:
    """What came to the old name since stays there, and what is under the new one stays as it is."""
    world.put("d/x", b"old")
    began = Subject(began_ns=world.tool.head("d/x").mtime_ns)
    client.local.rename("d", "m")
    world.later()
    world.put("d/x", b"newer")
    client.fs.core.db.begin("rename-directory", "d/", "m/", subject=began)
    client.fs.core.db.begin("rename-file", "d/x", "m/x", subject=Subject(began_ns=1))
    client.kill()
    boot()
    again = client.again()
    assert (world.body("d/x"), world.body("m/x")) == (b"newer", b"old")
    assert again.fs.core.db.intents() == []
