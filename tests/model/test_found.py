"""Histories that once broke a promise, kept: each was found by the state machine or while it was written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastore.fuse.ops import Fh, OpenRequest
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from tests.clock import ManualClock
from tests.localfs import ME, File
from tests.memorystore import MemoryBucket, MemoryStore
from tests.model.invariants import check
from tests.model.mounts import Mount
from tests.promises import promise

TTL_S = 1.0


class Bench:
    """One bucket, two mounts with a time to live of a second, a clock."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.clock = ManualClock()
        self.bucket = MemoryBucket(clock=self.clock.time_ns)
        self.plain = BlockingStore(MemoryStore(self.bucket))
        self.one = Mount(directory / "one", self.bucket, self.clock, ttl_s=TTL_S, **options)
        self.two = Mount(directory / "two", self.bucket, self.clock, ttl_s=TTL_S, **options)

    def put(self, key: str, body: bytes = b"") -> None:
        self.plain.put(key, body, WriteOptions())
        self.clock.advance(TTL_S + 0.1)

    def delete(self, key: str) -> None:
        self.plain.delete(key)
        self.clock.advance(TTL_S + 0.1)

    def restart(self, *files: File) -> None:
        """Another server takes over mount one, in which these are open."""
        self.one.crash()
        self.one.build(resumed=True)
        self.one.take_over(list(files))

    def keys(self) -> dict[str, bytes]:
        return {raw.decode(): stored.body for raw, stored in self.bucket.objects.items()}


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, **getattr(request, "param", {}))
    yield made
    for mount in (made.one, made.two):
        check(mount.fs, restarted=mount.restarted)
        mount.crash()


LARGE_DIRECTORIES = pytest.mark.parametrize("bench", [{"page_keys": 3}], indirect=True)


def test_a_directory_is_not_opened_with_truncation(bench: Bench) -> None:
    """open(O_TRUNC) of a directory staged an empty file for it, which then overwrote its marker."""
    bench.put("d/")
    ino = bench.one.local.stat("d").ino
    with pytest.raises(IsADirectoryError):
        bench.one.local._call.open(ME, ino, OpenRequest(flags=os.O_RDWR | os.O_TRUNC))
    assert not bench.one.fs.uploads.unsent()


@promise("S-37")
def test_a_link_does_not_hide_a_directory_of_its_key(bench: Bench) -> None:
    """The object `a.rclonelink` beside the directories `a` and `a.rclonelink` took the place of the latter."""
    for key in ("a/", "a.rclonelink/f", "a.rclonelink"):
        bench.put(key)
    assert bench.one.local.listdir() == [b"a", b"a.rclonelink", "a.rclonelink\uf000".encode()]
    assert bench.one.local.listdir("a.rclonelink") == [b"f"]


@promise("S-37")
def test_a_directory_named_like_a_link_has_its_own_key(bench: Bench) -> None:
    """Mkdir escaped the name, so that two directories `x.rclonelink` could be shown."""
    bench.one.local.mkdir("x.rclonelink")
    assert list(bench.keys()) == ["x.rclonelink/"]
    bench.one.local.rename("x.rclonelink", "y.rclonelink")
    assert list(bench.keys()) == ["y.rclonelink/"]


@promise("S-03")
def test_a_directory_whose_marker_went_has_default_attributes(bench: Bench) -> None:
    """It kept what the marker had said."""
    bench.one.local.mkdir("d", 0o700)
    bench.put("d/f")
    assert bench.one.local.stat("d").mode & 0o777 == 0o700
    bench.delete("d/")
    assert bench.one.local.stat("d").mode & 0o777 == 0o755


@promise("S-162")
@pytest.mark.parametrize("looked", [False, True])
def test_a_change_of_a_replaced_file_is_told_and_kept(bench: Bench, looked: bool) -> None:
    """What was written after this mount had seen the replacement was dropped, and close returned 0."""
    bench.put("f", b"old")
    file = bench.one.local.open("f", os.O_RDWR)
    file.read()
    bench.put("f", b"theirs")
    if looked:
        assert bench.one.local.read("f") == b"theirs"
    file.write(b"ours", 0)
    assert bench.one.local.read("f") == b"ours"
    with pytest.raises(OSError, match="another client changed this file") as told:
        file.close()
    assert told.value.errno == errno.ESTALE
    assert bench.keys()["f"] == bench.one.local.read("f") == b"theirs"
    (row,) = bench.one.fs.uploads.unsent()
    assert (bench.one.fs.core.staging_dir / str(row["staging"])).read_bytes() == b"ours"


@promise("S-18")
def test_a_file_removed_elsewhere_is_written_again(bench: Bench) -> None:
    """The same for a file that another client had removed, and its directory with it."""
    bench.put("d/f", b"old")
    with bench.one.local.opened("d/f", os.O_RDWR) as file:
        file.read()
        bench.delete("d/f")
        assert bench.one.local.listdir() == []
        file.write(b"our", 0)
        assert bench.one.local.listdir("d") == [b"f"]
    assert bench.keys() == {"d/f": b"our"}


@promise("S-37")
def test_an_unsent_file_is_shown_once(bench: Bench) -> None:
    """Its key was listed a second time under the name that an object beside a directory has."""
    with bench.one.local.opened("a", os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
        file.write(b"x")
        bench.put("a", b"theirs")
        bench.put("a/b")
        assert bench.one.local.listdir() == [b"a"]
    bench.clock.advance(TTL_S + 0.1)
    assert bench.one.local.listdir() == [b"a", "a\uf000".encode()]


@promise("S-37")
def test_an_open_file_goes_on_beside_a_directory_of_its_name(bench: Bench) -> None:
    """Ftruncate was ESTALE, and a write stayed unsent, once another client had made its name a directory."""
    bench.put("a", b"old")
    with bench.one.local.opened("a", os.O_RDWR) as file:
        file.read()
        bench.put("a/b")
        assert bench.one.local.listdir() == [b"a", "a\uf000".encode()]
        file.truncate(1)
        file.write(b"x", 1)
        assert bench.one.local.listdir() == [b"a", "a\uf000".encode()]
    assert bench.keys() == {"a": b"ox", "a/b": b""}


@promise("S-29", "S-37")
def test_what_was_shown_beside_a_name_is_shown_as_it_when_that_goes(bench: Bench) -> None:
    """The cached listing went on to show it under the other name."""
    for key in ("a", "a/", "x", "x.rclonelink"):
        bench.put(key, b"" if key.endswith("/") else b"t")
    bench.one.local.listdir()
    bench.one.local.rmdir("a")
    bench.one.local.unlink("x")
    bench.clock.advance(0.01)
    assert bench.one.local.read("a") == bench.one.local.readlink("x") == b"t"


@promise("S-29")
def test_a_listing_knows_what_was_sent(bench: Bench) -> None:
    """The cached listing kept the size of before, and a node that the kernel had forgotten was made from it."""
    bench.put("f", b"old")
    bench.one.local.listdir()
    bench.one.local.write("f", b"newer")
    bench.one.forget()
    assert bench.one.local.read("f") == b"newer"


@promise("S-37")
@LARGE_DIRECTORIES
def test_odd_names_are_found_in_large_directories(bench: Bench) -> None:
    """A single HEAD can't tell what is shown under them: the look-up failed where the listing had the name."""
    for key in ("a", "b", "c", "x", "x.rclonelink", "d.rclonelink/f", "\uf0c3\uf0a9"):
        bench.put(key, b"1")
    for name in bench.one.local.listdir():
        assert bench.one.local.exists(name), name


@promise("S-37")
@LARGE_DIRECTORIES
def test_a_link_that_became_a_file_is_seen_in_a_large_directory(bench: Bench) -> None:
    """A known link was only asked for as a link."""
    for key in ("a", "b", "c", "x.rclonelink"):
        bench.put(key, b"a")
    assert bench.one.local.readlink("x") == b"a"
    bench.put("x", b"file")
    assert bench.one.local.read("x") == b"file"


@promise("S-41")
@pytest.mark.parametrize("offset", [5, 10_000])
def test_writes_go_on_at_a_new_server(bench: Bench, offset: int) -> None:
    """A file that was open when the server died was taken for empty: reads gave nothing, a write destroyed it."""
    body = b"0123456789" * 1000
    bench.one.local.write("f", body)
    file = bench.one.local.open("f", os.O_RDWR)
    bench.restart(file)
    assert bytes(file._call.read(file.ino, Fh(99), 0, 1 << 20)) == body
    file.write(b"XY", offset)
    file.close()
    assert bench.keys() == {"f": body[:offset] + b"XY" + body[offset + 2 :]}


@promise("S-41")
def test_names_of_an_earlier_server_are_restored_once(bench: Bench) -> None:
    """Two nodes that had the same name one after the other both had it at the new server."""
    bench.one.local.write("f", b"1")
    held = bench.one.local.open("f")
    bench.one.local.unlink("f")
    bench.one.local.write("f", b"2")
    bench.restart()
    check(bench.one.fs, restarted=True)
    assert bench.one.local.read("f") == b"2"
    assert bench.one.local.stat("f").ino != held.ino


@promise("S-20", "S-41")
def test_what_a_new_server_sent_is_not_sent_again(bench: Bench) -> None:
    """It stayed in the journal, so that the next mount wrote it over what another client wrote later."""
    file = bench.one.local.open("f", os.O_RDWR | os.O_CREAT)
    file.write(b"ours")
    bench.restart(file)
    file.fsync()
    assert bench.keys() == {"f": b"ours"}
    check(bench.one.fs, restarted=True)
    bench.put("f", b"theirs")
    bench.one.crash()
    bench.one.build()
    assert bench.keys() == {"f": b"theirs"}


@promise("S-36")
def test_a_directory_renamed_over_one_of_another_spelling_replaces_it(bench: Bench) -> None:
    """Its key is one that we would spell another way: it stayed, and was shown beside the renamed one."""
    name = "\uf0c3\uf0a9"
    bench.put(f"{name}/", b"")
    bench.one.local.mkdir("d")
    bench.one.local.write("d/f", b"f")
    bench.one.local.rename("d", name)
    bench.clock.advance(TTL_S + 0.1)
    assert bench.one.local.listdir("") == [name.encode()]
    assert bench.one.local.read(f"{name}/f") == b"f"


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("change", ["unlink", "rename"])
def test_a_name_that_goes_goes_for_what_another_client_put_there_too(bench: Bench, looks: bool, change: str) -> None:
    """The file was never sent, so nothing was removed: the other client's file stood there after the removal."""
    one = bench.one.local
    file = one.open("a", os.O_RDWR | os.O_CREAT)
    bench.put("a", b"theirs")
    if looks:
        one.scandir("")
    if change == "unlink":
        one.unlink("a")
    else:
        one.rename("a", "b")
    keys = bench.keys()
    assert "a" not in keys
    assert b"a" not in dict(one.scandir(""))
    file.write(b"ours", 0)
    file.close()
    assert bench.keys() == ({} if change == "unlink" else {"b": b"ours"})


@promise("S-28", "S-47")
@pytest.mark.parametrize("bench", [{"conflict": "fail"}], indirect=True)
def test_a_directory_goes_with_the_unsent_file_that_kept_it(bench: Bench) -> None:
    """The directory above went on to list it after the file had lost its conflict."""
    bench.put("d/e/f", b"old")
    file = bench.two.local.open("d/e/f", os.O_RDWR | os.O_TRUNC)
    bench.one.local.rename("d/e", "e")
    bench.clock.advance(TTL_S + 0.1)
    assert bench.two.local.listdir("d") == [b"e"]
    assert bench.two.local.exists("d/e")
    with pytest.raises(OSError, match="another client changed this file"):
        file.close()
    assert not bench.two.local.exists("d/e")
    assert bench.two.local.listdir("d") == []
