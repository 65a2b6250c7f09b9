"""What holds when the disk of the state directory is full just then (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from datastore.fuse.state.removed import RemovedFiles
from datastore.fuse.state.statedb import StateDb
from tests.faulty import Fault, no_faults
from tests.mounted import DOWN, Client, World, failing, pattern

MIB = 1 << 20
LARGE = pattern(3 * MIB)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    """S-157 what is written to it afterwards goes to its name, not to the hidden copy, which the next mount removes."""
    with removing.local.opened("f", os.O_RDWR) as file:
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, full)
            failing(errno.ENOSPC, how, removing)
        file.write(b"later", 0)
    again = removing.again()
    assert world.body("f") == b"later" + LARGE[5:]
    assert again.local.read("g") == b"replacement"
    assert world.all_keys() == ["f", "g"]


def test_a_rename_that_failed_is_not_carried_out_later(
    world: World, removing: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-157 S-27 the journal had room for its beginning, and none for its end."""
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


def test_a_small_file_whose_removal_failed_is_sent_by_the_next_server(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-157 it is not taken for removed there."""
    world.put("f", b"small")
    world.put("g", b"replacement")
    file = one.local.open("f", os.O_RDWR)
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "begin", full)
        failing(errno.ENOSPC, rename_over, one)
    file.write(b"later", 0)
    after = one.again(resumed=True)
    assert after.fs.flush_all() == []
    assert world.body("f") == b"later"


def test_a_full_disk_does_not_keep_a_start_from_ending_what_was_begun(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-27 the rename is finished, and the mount serves; that it is done is written down by the next start."""
    world.put("f", b"moves")
    one.fs.core.db.begin("rename-file", "f", "to")
    one.kill()
    with monkeypatch.context() as patched:
        patched.setattr(StateDb, "_transaction", full)
        again = one.again()
    assert again.local.read("to") == b"moves"
    assert one.again().fs.core.db.intents() == []
    assert world.all_keys() == ["to"]
