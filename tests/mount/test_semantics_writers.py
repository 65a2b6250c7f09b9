"""Who opens to write what another client closed a moment before (docs/SEMANTICS.md, Writing beside other clients).

The mount looks before the other client writes, and believes what it saw for a minute: only asking shows it the truth.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import TTL, Mount, Objects, error_of, fails, mounted, opened, settle
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server

pytestmark = pytest.mark.fuse

OLD, THEIRS, OURS = b"old version", b"what another client closed before", b"OURS"


def write_to(path: Path, flags: int) -> None:
    with opened(path, flags) as fd:
        os.write(fd, OURS)


def write_to_map(path: Path) -> None:
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        size = os.fstat(fd).st_size
        assert size, "it was opened empty"
        with mmap.mmap(fd, size) as mapped:
            mapped[:4] = OURS


def through_a_link(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path.name)
    write_to(link, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def rename_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(OURS)
    other.rename(path)


def allocate(path: Path) -> None:
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, len(THEIRS) + 5)


HOW: dict[str, tuple[Callable[[Path], None], bytes]] = {
    "touch": (lambda path: write_nothing(path, os.O_WRONLY | os.O_CREAT), THEIRS),
    "create": (lambda path: write_to(path, os.O_WRONLY | os.O_CREAT), OURS + THEIRS[4:]),
    "append": (lambda path: write_to(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), THEIRS + OURS),
    "read-write": (lambda path: write_to(path, os.O_RDWR | os.O_CREAT), OURS + THEIRS[4:]),
    "truncating": (lambda path: write_to(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), OURS),
    "read-write-existing": (lambda path: write_to(path, os.O_RDWR), OURS + THEIRS[4:]),
    "append-existing": (lambda path: write_to(path, os.O_WRONLY | os.O_APPEND), THEIRS + OURS),
    "map": (write_to_map, OURS + THEIRS[4:]),
    "truncate-by-path": (lambda path: os.truncate(path, 7), THEIRS[:7]),
    "extend-by-path": (lambda path: os.truncate(path, 50), THEIRS.ljust(50, b"\0")),
    "fallocate": (allocate, THEIRS + bytes(5)),
    "setxattr": (lambda path: os.setxattr(path, "user.ours", OURS), THEIRS),
    "chmod": (lambda path: path.chmod(0o640), THEIRS),
    "rename-over": (rename_over, OURS),
    "link-target": (through_a_link, THEIRS + OURS),
}
"""What is done, and what the object is afterwards."""
NAMES_IT = {"read-write-existing", "append-existing", "truncate-by-path", "extend-by-path", "setxattr", "chmod"}
"""Those that need the name to be there already: where it is believed absent that is what they say (S-28)."""
BELIEFS = ("absent", "older", "directory")


CREATES = os.O_WRONLY | os.O_CREAT
COSTS: dict[str, tuple[int, dict[str, int]]] = {
    "ours": (CREATES, {}),
    "ours-anew": (CREATES | os.O_TRUNC, {}),
    "ours-appended-to": (os.O_WRONLY | os.O_APPEND, {}),
    "theirs": (CREATES, {"head": 1}),
    "theirs-anew": (CREATES | os.O_TRUNC, {"head": 1}),
    "theirs-read": (os.O_RDONLY, {}),
    "new": (CREATES, {"head": 2, "list_page": 1}),
    "new-anew": (CREATES | os.O_TRUNC, {}),
    "new-alone": (CREATES | os.O_EXCL, {"put": 1}),
}
"""What an open asks the store, by whose the name is; nothing of it is asked one after the other."""


def write_nothing(path: Path, flags: int) -> None:
    with opened(path, flags):
        pass


def put_by_boto(_: Mount, objects: Objects, key: str, body: bytes) -> None:
    objects.put(key, body)


def put_by_mount(other: Mount, _: Objects, key: str, body: bytes) -> None:
    path = other.path / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(body)


WRITERS = {"boto3": put_by_boto, "mount": put_by_mount}


@dataclass(frozen=True)
class Believing:
    """A mount that believes for a minute, and one of the same bucket that does not."""

    here: Mount
    other: Mount


@pytest.fixture(scope="module")
def believing(way: tuple[Server, str], clean_environment: Path) -> Iterator[Believing]:
    server, transport = way
    bucket = new_bucket(server)
    objects = Objects(server, bucket)
    objects.put_empty(f"{how}-{belief}-{writer}/known" for how in HOW for belief in BELIEFS for writer in WRITERS)
    objects.put_empty(f"costs/{name}" for name in COSTS if name.startswith("theirs"))
    for how in HOW:
        for writer in WRITERS:
            objects.put(f"{how}-older-{writer}/f", OLD)
    with (
        mounted(server, bucket, clean_environment, transport, metadataTTL="60s") as here,
        mounted(server, bucket, clean_environment, transport, metadataTTL=TTL) as other,
    ):
        yield Believing(here, other)


def unsent(mount: Mount, area: str) -> list[str]:
    return [row["path"] for row in mount.told()["dirty"] if row["path"].startswith(f"{area}/")]


@promise("S-161")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("belief", BELIEFS)
@pytest.mark.parametrize("how", HOW)
def test_what_was_closed_before_an_open_is_seen_by_it(believing: Believing, how: str, belief: str, writer: str) -> None:
    """Every way to open for writing, of a name that was believed absent, or to be an older version, or that is a
    directory by now of which only the key below says so."""
    here, objects = believing.here, believing.here.objects
    area = f"{how}-{belief}-{writer}"
    path, key = here.path / area / "f", f"{area}/f"
    change, expected = HOW[how]
    if belief == "older":
        assert path.read_bytes() == OLD
    else:
        assert os.listdir(path.parent) == ["known"]
        fails(errno.ENOENT, os.stat, path)
    if belief == "directory":
        WRITERS[writer](believing.other, objects, f"{key}/below", THEIRS)
        # chmod and setxattr of a directory are fine; where it is believed absent they say so.
        assert error_of(change, path) in ((errno.ENOENT,) if how in NAMES_IT else (errno.EISDIR, errno.EEXIST))
        assert objects.get(f"{key}/below") == THEIRS
        assert f"{key}/below" in objects.keys(f"{area}/"), "no other client sees it any more"
        # versitygw refuses a file there at close only: what was to replace one is listed (S-38).
        assert unsent(here, area) == [key] * (how == "truncating" and here.server.name == "versitygw")
        return
    WRITERS[writer](believing.other, objects, key, THEIRS)
    if belief == "absent" and how in NAMES_IT:
        fails(errno.ENOENT, change, path)
        expected = THEIRS
    else:
        change(path)
    assert objects.get(key) == expected
    if belief == "older" or how not in NAMES_IT:
        assert path.read_bytes() == expected
    assert unsent(here, area) == []


@promise("S-161")
@pytest.mark.parametrize("name", COSTS)
def test_what_an_open_asks_the_store(believing: Believing, name: str) -> None:
    """What this mount made a moment ago it need not ask for."""
    here, area = believing.here, believing.here.path / "costs"
    flags, expected = COSTS[name]
    assert set(os.listdir(area)) >= {one for one in COSTS if one.startswith("theirs")}
    if name.startswith("ours"):
        (area / name).write_bytes(b"ours")
    if name.startswith("theirs"):
        (area / name).stat()
    before = here.calls()
    with opened(area / name, flags):
        asked = {method: count - before.get(method, 0) for method, count in here.calls().items()}
    if name == "new-anew" and here.server.name == "minio":
        expected = {"list_page": 1}  # where a file would hide what is below it
    assert {method: count for method, count in asked.items() if count} == expected


@promise("S-162")
def test_a_change_never_replaces_what_another_client_closed_meanwhile(believing: Believing) -> None:
    """While a file is open here; the close is ESTALE, theirs stays, ours is listed, and can be saved."""
    here, objects = believing.here, believing.here.objects
    area = here.path / "append-absent-boto3"
    for name, large in (("changed", b""), ("changed-large", bytes(20 << 20)), ("made", b"")):
        key, path = f"{area.name}/meanwhile-{name}", area / f"meanwhile-{name}"
        if name != "made":
            objects.put(key, OLD + large)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, OURS)
        objects.put(key, THEIRS)
        fails(errno.ESTALE, os.close, fd)
        assert objects.get(key) == THEIRS
        assert key in unsent(here, area.name)
        if here.transport == "kernel":  # libfuse's size of it is believed for a minute
            eventually(lambda: path.read_bytes() == THEIRS, "the name shows what is in the store")  # noqa: B023
            write_to(path, os.O_WRONLY | os.O_APPEND)
            assert objects.get(key) == THEIRS + OURS
    done = here.command("unsent", "--discard", f"{area.name}/meanwhile-made", here.path)
    assert done.returncode == 0, done.stderr
    assert f"{area.name}/meanwhile-made" not in unsent(here, area.name)


@promise("S-162", "S-32")
def test_a_touch_gives_way_and_who_writes_anew_does_not(believing: Believing) -> None:
    """A new file to which nothing was written is the one that another client closed meanwhile; of who truncates it, the
    last close wins, whether the name is there or not."""
    here, objects, key = believing.here, believing.here.objects, "touch-absent-boto3/meanwhile"
    with opened(here.path / key, os.O_WRONLY | os.O_CREAT):
        objects.put(key, THEIRS)
    assert objects.get(key) == THEIRS
    touched = here.path / key
    if here.transport == "kernel":  # which is told of the size; libfuse's is believed for a minute
        eventually(lambda: touched.read_bytes() == THEIRS, "the name shows what is in the store")
    key = "truncating-absent-boto3/meanwhile"
    for _ in range(2):
        with opened(here.path / key, CREATES | os.O_TRUNC) as fd:
            os.write(fd, OURS)
            objects.put(key, THEIRS)
        assert objects.get(key) == OURS


@promise("S-162", "S-31")
@pytest.mark.parametrize("noticed", ["", "listed", "stat"])
def test_who_appends_goes_on_from_what_he_opened(believing: Believing, noticed: str) -> None:
    """Another client appends as well while the file is open; only who reads follows it."""
    path, objects = believing.other.path / f"append-absent-mount/log{noticed}", believing.here.objects
    key = f"append-absent-mount/{path.name}"
    objects.put(key, b"first\n")
    settle()
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        objects.put(key, b"first\nTHEIRS\n")
        settle()
        if noticed:
            _ = os.listdir(path.parent) if noticed == "listed" else path.stat()
        told = error_of(os.write, fd, b"ours\n") or error_of(os.fsync, fd)
        assert told == errno.ESTALE
        assert objects.get(key) == b"first\nTHEIRS\n"
