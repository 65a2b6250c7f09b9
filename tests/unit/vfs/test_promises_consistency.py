"""What holds between clients (docs/SEMANTICS.md): two mounts of one bucket, and time that a test moves."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from typing import Literal

import pytest

from datastore.fuse.ops import Fh, OpenRequest, SetAttr
from datastore.fuse.vfs.upload import upkeep
from datastore.fuse.vfs.upload.upkeep import BUSY_S, QUIET_S
from tests.driving import resolve
from tests.faulty import no_faults
from tests.localfs import ME
from tests.mounted import TTL_S, Client, World, failing, refuse_writes
from tests.promises import promise

BOTH_LISTINGS = True


@promise("S-28")
@pytest.mark.parametrize("attributes", ["full", "listing"])
@pytest.mark.parametrize("large", [False, True])
def test_what_one_client_closed_others_see_after_the_time_to_live(
    world: World, one: Client, attributes: Literal["full", "listing"], large: bool
) -> None:
    """New, changed and removed names, after at most the time to live; in a large directory they are asked for one by
    one."""
    world.put_all(f"d/{number:04}" for number in range(10))
    other = world.client(attributes=attributes)
    if large:
        other.ask_one_by_one("d")
    assert not other.local.exists("d/f")
    assert large or len(other.local.listdir("d")) == 10
    one.local.write("d/f", b"first")
    one.local.symlink(b"t", "d/x")
    one.local.mkdir("d/e")
    world.clock.advance(TTL_S)
    assert other.local.read("d/f") == b"first"
    assert other.local.readlink("d/x") == b"t"
    assert stat.S_ISDIR(other.local.stat("d/e").mode)
    assert large or other.local.listdir("d")[10:] == [b"e", b"f", b"x"]
    one.local.write("d/f", b"second!")
    world.clock.advance(TTL_S)
    assert other.local.stat("d/f").size == 7
    assert other.local.read("d/f") == b"second!"
    one.local.unlink("d/f")
    world.clock.advance(TTL_S)
    assert not other.local.exists("d/f")
    assert len(other.local.listdir("d")) == 12


@promise("S-28")
def test_within_the_time_to_live_answers_come_from_memory(world: World, one: Client) -> None:
    """The time is `metadataTTL`: until then an answer is given from memory, and no request is sent."""
    slow = world.client(ttl_s=60)
    world.put("f", b"first")
    assert slow.local.read("f") == b"first"
    one.local.write("f", b"second!")
    asked = slow.calls("head", "list_page")
    world.clock.advance(59)
    assert slow.local.stat("f").size == 5
    assert slow.calls("head", "list_page") == asked
    world.clock.advance(1)
    assert slow.local.stat("f").size == 7


@promise("S-28")
def test_the_kernel_is_not_told_to_keep_answers_longer(world: World, one: Client) -> None:
    """An answer may be kept for what is left of its time, a negative one too."""
    world.put("f", b"")
    caller = one.local._caller
    first = resolve(one.fs.lookup(caller, one.fs.core.nodes.root.ino, b"f"))
    assert (first.entry_ttl_s, first.attr_ttl_s) == (TTL_S, TTL_S)
    world.clock.advance(TTL_S * 3 / 4)
    for name in (b"f", b"absent"):
        entry = resolve(one.fs.lookup(caller, one.fs.core.nodes.root.ino, name))
        assert entry.entry_ttl_s <= TTL_S / 4
        assert entry.attr_ttl_s <= TTL_S / 4
    world.later()
    for name in (b"absent", b"f"):
        assert resolve(one.fs.lookup(caller, one.fs.core.nodes.root.ino, name)).entry_ttl_s == TTL_S


@promise("S-28")
def test_a_listing_of_the_parent_renews_no_old_attributes(world: World, one: Client, other: Client) -> None:
    """Listing the parent does not keep old attributes of a directory alive for ever."""
    one.local.mkdir("d", 0o755)
    assert stat.S_IMODE(other.local.stat("d").mode) == 0o755
    one.local.chmod("d", 0o700)
    for _ in range(6):
        world.clock.advance(TTL_S / 2)
        other.local.listdir()
        seen = stat.S_IMODE(other.local.stat("d").mode)
    assert seen == 0o700


@promise("S-28")
def test_a_name_of_which_another_client_changes_the_kind_is_seen(world: World, one: Client, other: Client) -> None:
    """A file that becomes a directory or a link for another client is that for us."""
    one.local.write("n", b"file")
    assert stat.S_ISREG(other.local.stat("n").mode)
    one.local.unlink("n")
    one.local.mkdir("n")
    one.local.write("n/below", b"x")
    world.later()
    assert other.local.listdir("n") == [b"below"]
    one.local.unlink("n/below")
    one.local.rmdir("n")
    one.local.symlink(b"t", "n")
    world.later()
    assert other.local.readlink("n") == b"t"


@promise("S-28")
@pytest.mark.parametrize("large", [False, True])
def test_the_kernel_drops_what_another_client_changed(world: World, one: Client, other: Client, large: bool) -> None:
    """Names and pages of what another client changed are dropped from the kernel's caches."""
    names = ["f", "g", "h"]
    world.put_all(names, b"old")
    if large:
        other.ask_one_by_one()
    ino, *_ = [other.local.stat(name).ino for name in names]
    one.local.write("f", b"newer")
    one.local.unlink("g")
    one.local.unlink("h")
    one.local.mkdir("h")
    world.later()
    if large:
        assert [other.local.exists(name) for name in names] == [True, False, True]
    else:
        other.local.listdir()
    assert (ino, 0) in other.kernel.inodes
    root = other.fs.core.nodes.root.ino
    assert {(root, b"g"), (root, b"h")} <= {*other.kernel.entries}


@promise("S-28", "S-30")
def test_a_replaced_file_of_a_large_directory_is_seen(world: World, one: Client, other: Client) -> None:
    """The name is asked for alone: it leads to the new version, the handle keeps the old one."""
    world.put("f", b"old")
    other.ask_one_by_one()
    with other.local.opened("f") as file:
        assert file.read() == b"old"
        one.local.write("f", b"newer")
        world.later()
        assert other.local.read("f") == b"newer"
        assert file.read() == b"old"


@promise("S-29", "S-161")
def test_what_an_open_for_writing_learned_is_shown_to_all(world: World, one: Client, other: Client) -> None:
    """What a listing says of the file is older, also for one whom the kernel asks after it has forgotten the file."""
    world.put_all(["f", "g"], b"old")
    for name in ("f", "g"):
        one.local.stat(name)
    other.local.write("f", b"newer")
    other.local.unlink("g")
    with one.local.opened("f", os.O_WRONLY):
        pass
    ino = one.local.stat("f").ino
    one.fs.forget(ino, 100)
    assert ino not in one.fs.core.nodes.by_ino
    assert one.local.stat("f").size == len(b"newer")
    with pytest.raises(FileNotFoundError):
        one.local.open("g", os.O_WRONLY)
    assert one.local.listdir() == [b"f"]


@promise("S-28")
def test_a_listing_shows_the_type_of_what_replaced_a_pipe(world: World, one: Client, other: Client) -> None:
    """A listing has no attributes: a pipe's type is known from before, but not that of what replaced it."""
    one.local.mknod("n", stat.S_IFIFO | 0o644)
    world.later()
    other.local.stat("n")
    assert other.local.scandir() == [(b"n", stat.S_IFIFO)]
    world.put("n", b"file")
    world.later()
    assert other.local.scandir() == [(b"n", stat.S_IFREG)]


@promise("S-28")
def test_a_directory_stays_that_holds_only_unsent_files(world: World, one: Client) -> None:
    """Another client removed what was in it, and with that the directory; who works here has it."""
    world.put("d/x")
    with one.local.opened("d/f", os.O_CREAT | os.O_WRONLY) as file:
        file.write(b"ours")
        world.tool.delete_many([key for key in world.all_keys() if key != "d/f"])
        world.later()
        assert one.local.exists("d")
    assert world.body("d/f") == b"ours"


@promise("S-28")
def test_pages_are_kept_between_opens_of_one_version(world: World, one: Client, other: Client) -> None:
    """The kernel's pages are used again until another client writes the file."""
    world.put("f", b"old")

    def keeps(client: Client) -> bool:
        ino = client.local.stat("f").ino
        reply = resolve(client.fs.open(client.local._caller, ino, OpenRequest(flags=os.O_RDONLY)))
        resolve(client.fs.release(ino, reply.fh))
        return reply.keep_cache

    assert not keeps(other)
    assert keeps(other)
    world.later()
    assert keeps(other)
    one.local.write("f", b"newer")
    world.later()
    assert not keeps(other)
    assert keeps(other)


@promise("S-28")
def test_setattr_of_what_another_client_removed_is_estale(world: World, one: Client) -> None:
    """A change of attributes of what another client removed is ESTALE, for which the kernel looks again."""
    world.put("f", b"x")
    ino = one.local.stat("f").ino
    world.tool.delete("f")
    failing(errno.ESTALE, lambda: resolve(one.fs.setattr(one.local._caller, ino, Fh(0), SetAttr(mode=0o600))))
    assert world.all_keys() == []
    world.put("f", b"x")
    ino = one.local.stat("f").ino
    one.before_next("copy", lambda: world.tool.delete("f"))
    failing(errno.ESTALE, lambda: resolve(one.fs.setattr(one.local._caller, ino, Fh(0), SetAttr(mode=0o600))))
    assert world.all_keys() == []


@promise("S-28")
@pytest.mark.parametrize("key", ["name", "name/below"])
def test_a_stat_of_what_another_client_removed_is_estale(world: World, one: Client, key: str) -> None:
    """By its inode, as the kernel asks within the time for which it believes the name."""
    world.put(key)
    ino = one.local.stat("name").ino
    world.tool.delete(key)
    world.later()
    failing(errno.ESTALE, resolve, one.fs.getattr(ino, Fh(0)))


@promise("S-28")
def test_nothing_is_made_in_a_directory_that_another_client_removed(world: World, one: Client) -> None:
    """The kernel, or a process that is in it, may still have it."""
    world.put("d/g")
    d = one.local.stat("d").ino
    world.tool.delete("d/g")
    world.later()
    assert one.local.listdir() == []
    failing(errno.ENOENT, resolve, one.fs.mkdir(ME, d, b"new", 0o755))
    failing(errno.ENOENT, resolve, one.fs.mknod(ME, d, b"new", stat.S_IFREG | 0o644, 0))
    assert world.all_keys() == []


@promise("S-28")
def test_a_directory_that_is_slow_to_list_is_not_listed_for_each_name(world: World, one: Client) -> None:
    """A listing that takes longer than the time to live is believed for twice as long as it took."""
    names = [f"d/{number:02d}" for number in range(20)]
    world.put_all(names)
    one.faulty.plan = lambda index, method: world.clock.advance(3.0) if method == "list_page" else None
    one.local.listdir("d")
    before = one.calls("list_page")
    for name in names:
        one.local.stat(name)
    assert one.calls("list_page") - before <= 2
    world.later(100)
    heads = one.calls("head")
    assert not any(one.local.exists(f"{name}x") for name in names)
    assert one.calls("head") - heads <= 1, "the listing says what there is not"


@promise("S-28", "S-43")
def test_libfuse_and_the_mount_share_the_time_to_live(one: Client) -> None:
    """Libfuse gives the kernel one time for all answers: it and the mount's own add up to metadataTTL."""
    assert replace(one.spec, transport="libfuse").believed_s == one.spec.metadata_ttl_s / 2
    assert one.spec.believed_s == one.spec.metadata_ttl_s


@promise("S-11")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("attributes", ["full", "listing"])
def test_a_chmod_keeps_what_another_client_has_just_written(
    world: World, attributes: Literal["full", "listing"], other: Client, late: bool
) -> None:
    """A listing from before does not tell what the other left, whatever it shows. late: while the chmod is made."""
    one = world.client(attributes=attributes)
    world.put("f", b"old")
    one.local.stat("f")
    if late:
        one.before_next("copy", lambda: world.put("f", b"new bytes"))
    else:
        other.local.write("f", b"new bytes")
    one.local.chmod("f", 0o640)
    assert world.body("f") == b"new bytes"
    assert world.metadata("f")["mode"] == str(stat.S_IFREG | 0o640)
    assert one.local.read("f") == b"new bytes"


APPEND = os.O_CREAT | os.O_WRONLY | os.O_APPEND


def publish(client: Client) -> None:
    """What the upkeep does, once a second."""
    resolve(client.fs.upkeep.go_round())


@promise("S-44")
def test_a_quiet_log_is_seen_before_it_is_closed(world: World, one: Client, other: Client) -> None:
    """Three seconds after the last write another client reads what was written."""
    first = b"first\n" * 1000
    with one.local.opened("log", APPEND) as log:
        world.clock.advance(QUIET_S)
        publish(one)
        log.write(first)
        publish(one)
        assert not other.local.exists("log")
        world.clock.advance(QUIET_S + 0.5)
        publish(one)
        world.clock.advance(QUIET_S)
        assert other.local.read("log") == first
        log.write(b"second\n", len(first))
        world.clock.advance(QUIET_S)
        publish(one)
        world.clock.advance(QUIET_S)
        assert other.local.read("log") == first + b"second\n"


@promise("S-44")
def test_a_busy_log_is_published_every_so_often(world: World, one: Client, other: Client) -> None:
    """A log that is written each second is published after 15 s."""
    with one.local.opened("log", APPEND) as log:
        for second in range(int(BUSY_S) + 1):
            log.write(b".", second)
            publish(one)
            world.clock.advance(1.0)
        assert one.calls("put") == 1
        assert other.local.stat("log").size >= BUSY_S


@promise("S-44")
@pytest.mark.parametrize(("limit", "pause_s"), [("QUIET_BYTES", QUIET_S), ("BUSY_BYTES", 1.0)])
def test_a_log_that_grew_by_too_much_waits_for_its_close(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, limit: str, pause_s: float
) -> None:
    """A writer waits while its file is sent."""
    monkeypatch.setattr(upkeep, limit, 5)
    with one.local.opened("most", APPEND) as most, one.local.opened("more", APPEND) as more:
        most.write(b"1")
        more.write(b"1")
        world.clock.advance(BUSY_S - 1.0)
        most.write(b"2345", 1)
        more.write(b"23456", 1)
        world.clock.advance(pause_s)
        publish(one)
        assert world.all_keys() == ["most"]


@promise("S-19", "S-44")
def test_a_log_that_could_not_be_sent_waits_for_the_next_retry(world: World, one: Client) -> None:
    """It is not tried each second, however long it was quiet; then it is whole."""
    log = one.local.open("log", APPEND)
    log.write(b"first\n")
    refuse_writes(one)
    failing(errno.EIO, log.fsync)
    log.write(b"second\n", 6)
    tried = one.calls("put")
    for _ in range(5):
        world.clock.advance(QUIET_S)
        publish(one)
    assert one.calls("put") == tried
    one.faulty.plan = no_faults
    resolve(one.fs.upkeep.retry())
    assert world.body("log") == b"first\nsecond\n"


@promise("S-44")
def test_a_file_that_is_rewritten_waits_for_its_close(world: World, one: Client, other: Client) -> None:
    """A change in the middle is not shown half-made."""
    one.local.write("file", b"0123456789")
    with one.local.opened("file", os.O_RDWR) as file:
        file.write(b"x", 3)
        world.clock.advance(10 * BUSY_S)
        publish(one)
        assert other.local.read("file") == b"0123456789"
    world.clock.advance(QUIET_S)
    assert other.local.read("file") == b"012x456789"


ANEW = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


@promise("S-32", "S-44", "S-162")
@pytest.mark.parametrize(("flags", "hole"), [(APPEND, 0), (ANEW, 0), (ANEW, 9000)])
@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("write_back_s", [0.0, 5.0])
def test_a_publication_does_not_decide_whose_close_wins(
    world: World, other: Client, flags: int, hole: int, looked: bool, write_back_s: float
) -> None:
    """A publication is no close of what was written anew; who appends loses what another truncated, and so does who
    left a hole, which only the store has. looked: the name was looked up since, and has the other client's file.
    """
    one = world.client(write_back_s=write_back_s)
    log = one.local.open("log", flags)
    log.write(b"from one", hole)
    world.clock.advance(QUIET_S)
    publish(one)
    other.local.write("log", b"from two")
    world.clock.advance(QUIET_S)
    if looked:
        assert one.local.stat("log").size == 8
    log.close()
    assert resolve(one.fs.flush_all()) == []
    world.clock.advance(QUIET_S)
    assert other.local.read("log") == (b"from one" if flags == ANEW and not hole else b"from two")


@promise("S-32", "S-44")
@pytest.mark.parametrize("removed", [False, True])
def test_what_was_published_is_not_sent_again(world: World, one: Client, other: Client, removed: bool) -> None:
    """What another client has removed stays removed."""
    with one.local.opened("log", ANEW) as log:
        log.write(b"all of it")
        world.clock.advance(QUIET_S)
        publish(one)
        if removed:
            other.local.unlink("log")
    assert world.all_keys() == ([] if removed else ["log"])
    assert one.calls("put") == 1
