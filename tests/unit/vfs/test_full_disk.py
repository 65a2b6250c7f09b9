"""What holds when the disk of the state directory is full just then (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from datastore.fuse.state.removed import RemovedFiles
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
def test_a_rename_that_failed_is_not_carried_out_later(
    world: World, removing: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal had room for its beginning, and none for its end."""
    with removing.local.opened("f", os.O_RDWR) as file:
        with monkeypatch.context() as patched:

            def down(index: int, method: str) -> Fault | None:
                if method != "copy":
                    return None
                if removing.fs.core.db.intents()[-1].kind == "discard":
                    return None  # the copy that keeps what is replaced
                patched.setattr(StateDb, "_transaction", full)
                return Fault(DOWN)

            removing.faulty.plan = down
            failing(errno.EIO, rename_over, removing)
            removing.faulty.plan = no_faults
        file.write(b"later", 0)
    removing.fs.core.db.drop_forgotten()  # as upkeep does
    removing.again()
    assert world.body("f") == b"later" + LARGE[5:]
    assert world.body("g") == b"replacement"


@promise("S-157")
def test_a_small_file_whose_removal_failed_is_sent_by_the_next_server(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_full_disk_does_not_keep_a_start_from_ending_what_was_begun(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_file_that_the_journal_has_no_room_for_is_not_made(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC to who creates it: the next server is told of no such file, and the name is free."""
    core = one.fs.core
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "record_unsent", full)
        failing(errno.ENOSPC, one.local.open, "f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    core.rewrite_nodelog()
    assert core.nodelog.records == 0
    with one.local.opened("f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        assert core.nodelog.records == 1
        file.write(b"bytes")
    assert world.body("f") == b"bytes"


@promise("S-50")
def test_a_file_that_the_journal_has_no_room_for_leaves_nothing(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its staging file and the descriptor of that are given back, and its node is forgotten."""
    core = one.fs.core
    nodes = set(core.nodes.by_ino)
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "record_unsent", full)
        failing(errno.ENOSPC, one.local.open, "f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert list(core.staging_dir.iterdir()) == []
    assert [path for path in open_files() if path.startswith(f"{core.staging_dir}/")] == []
    assert set(core.nodes.by_ino) == nodes
