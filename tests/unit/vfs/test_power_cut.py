"""What holds when the machine went down (docs/SEMANTICS.md): the disk has what was synced, and of the rest anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datastore.fuse.state import statedb
from datastore.fuse.state.rows import Subject
from tests.driving import resolve
from tests.mounted import Client, World
from tests.promises import promise

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
def test_what_was_sent_is_not_replaced_by_what_the_disk_has_of_it(
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
def test_what_was_not_sent_is_sent_after_a_boot(world: World, client: Client, boot: Boot, orderly: bool) -> None:
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
    client.fs.core.db.begin("rename-directory", "d/", "m/", None, began)
    client.fs.core.db.begin("rename-file", "d/x", "m/x", None, Subject(began_ns=1))
    client.kill()
    boot()
    again = client.again()
    assert (world.body("d/x"), world.body("m/x")) == (b"newer", b"old")
    assert again.fs.core.db.intents() == []
