"""What holds between clients (docs/SEMANTICS.md): two mounts of one bucket, and time that a test moves."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from typing import Literal

import pytest

from datastore.fuse.ops import Fh, OpenRequest, SetAttr
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.vfs.build import believed_s
from tests.driving import resolve
from tests.mounted import TTL_S, Client, World, failing
from tests.promises import promise

BOTH_LISTINGS = True


# -- S-28


@promise("S-28")
def test_what_one_closed_another_sees(world: World, one: Client, other: Client) -> None:
    """New, changed and removed names, after at most the time to live."""
    assert not other.local.exists("f")
    assert other.local.listdir() == []
    one.local.write("f", b"first")
    world.clock.advance(TTL_S)
    assert other.local.read("f") == b"first"
    assert other.local.listdir() == [b"f"]
    one.local.write("f", b"second!")
    world.clock.advance(TTL_S)
    assert other.local.stat("f").size == 7
    assert other.local.read("f") == b"second!"
    one.local.unlink("f")
    world.clock.advance(TTL_S)
    assert not other.local.exists("f")
    assert other.local.listdir() == []


@promise("S-28")
@pytest.mark.parametrize("attributes", ["full", "listing"])
def test_the_same_without_a_listing(world: World, one: Client, attributes: str) -> None:
    """Also in a large directory, where names are asked for one by one."""
    for number in range(10):
        world.put(f"d/{number:04}")
    other = world.client(attributes="full" if attributes == "full" else "listing")
    other.ask_one_by_one("d")
    assert not other.local.exists("d/f")
    one.local.write("d/f", b"first")
    one.local.symlink(b"t", "d/x")
    one.local.mkdir("d/e")
    world.later()
    assert other.local.read("d/f") == b"first"
    assert other.local.readlink("d/x") == b"t"
    assert stat.S_ISDIR(other.local.stat("d/e").mode)
    one.local.write("d/f", b"second!")
    world.later()
    assert other.local.read("d/f") == b"second!"
    one.local.unlink("d/f")
    world.later()
    assert not other.local.exists("d/f")
    assert len(other.local.listdir("d")) == 12


@promise("S-28")
def test_a_longer_time_to_live(world: World, one: Client) -> None:
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
    one.local.stat("f")
    world.clock.advance(TTL_S * 3 / 4)
    caller = one.local._caller
    for name in (b"f", b"absent"):
        entry = resolve(one.fs.lookup(caller, one.fs.core.nodes.root.ino, name))
        assert entry.entry_ttl_s <= TTL_S / 4
        assert entry.attr_ttl_s <= TTL_S / 4
    world.later()
    assert resolve(one.fs.lookup(caller, one.fs.core.nodes.root.ino, b"absent")).entry_ttl_s == TTL_S


@promise("S-28")
def test_attributes_of_a_directory_that_is_listed_all_the_time(world: World, one: Client, other: Client) -> None:
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
def test_a_name_that_changes_its_kind(world: World, one: Client, other: Client) -> None:
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
def test_a_kernel_that_holds_a_lost_name_is_told(world: World, one: Client, other: Client) -> None:
    """Names and pages of what another client changed are dropped from the kernel's caches."""
    world.put("f", b"old")
    world.put("g", b"old")
    ino = other.local.stat("f").ino
    other.local.stat("g")
    one.local.write("f", b"newer")
    one.local.unlink("g")
    world.later()
    other.local.listdir()
    assert (ino, 0) in other.kernel.inodes
    assert (other.fs.core.nodes.root.ino, b"g") in other.kernel.entries


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


# -- S-29


@promise("S-28")
def test_setattr_meets_a_removal(world: World, one: Client) -> None:
    """A change of attributes of what another client removed is ESTALE, for which the kernel looks again."""
    world.tool.put("f", b"x", WriteOptions())
    ino = one.local.stat("f").ino
    world.tool.delete("f")
    failing(errno.ESTALE, lambda: resolve(one.fs.setattr(one.local._caller, ino, Fh(0), SetAttr(mode=0o600))))
    assert world.all_keys() == []


@promise("S-28")
def test_a_directory_that_is_slow_to_list_is_not_listed_for_each_name(world: World, one: Client) -> None:
    """A listing that takes longer than the time to live is believed for twice as long as it took."""
    for number in range(20):
        world.tool.put(f"d/{number:02d}", b"x", WriteOptions())
    one.faulty.plan = lambda index, method: world.clock.advance(3.0) if method == "list_page" else None
    one.local.listdir("d")
    before = one.calls("list_page")
    for number in range(20):
        one.local.stat(f"d/{number:02d}")
    assert one.calls("list_page") - before <= 2


@promise("S-28", "S-43")
def test_libfuse_and_the_mount_share_the_time_to_live(one: Client) -> None:
    """Libfuse gives the kernel one time for all answers: it and the mount's own add up to metadataTTL."""
    assert believed_s(replace(one.spec, transport="libfuse")) == one.spec.metadata_ttl_s / 2
    assert believed_s(one.spec) == one.spec.metadata_ttl_s


@promise("S-11")
@pytest.mark.parametrize("attributes", ["full", "listing"])
def test_a_change_of_attributes_meets_a_change_by_another(
    world: World, attributes: Literal["full", "listing"], other: Client
) -> None:
    """A listing from before does not tell what the other left, whatever it shows."""
    one = world.client(attributes=attributes)
    world.put("f", b"old")
    one.local.stat("f")
    other.local.write("f", b"new bytes")
    one.local.chmod("f", 0o640)
    assert world.body("f") == b"new bytes"
    assert world.metadata("f")["mode"] == str(stat.S_IFREG | 0o640)
    assert one.local.read("f") == b"new bytes"
