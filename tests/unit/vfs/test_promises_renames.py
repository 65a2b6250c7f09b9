"""What renames promise (docs/SEMANTICS.md), over a bucket in memory."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from unittest.mock import AsyncMock, Mock

import pytest

from datastore.errors import AccessDenied, ObjectLocked, StoreError
from datastore.fuse.ops import SetAttr
from datastore.fuse.store.base import ObjectVersion
from datastore.fuse.vfs.change import renames
from datastore.fuse.vfs.upload import copies
from tests.driving import resolve
from tests.faulty import Fault, no_faults
from tests.localfs import ME
from tests.mounted import DOWN, Client, World, failing
from tests.promises import promise


@promise("S-25")
def test_a_file_is_renamed_with_its_attributes(world: World, one: Client, other: Client) -> None:
    """Content, metadata and content type go along; the old key is gone; the id stays."""
    one.local.mkdir("d")
    one.local.write("f", b"bytes")
    before = one.local.setattr("f", SetAttr(mode=0o640, uid=5, mtime_ns=1_000_000_001))
    world.later()
    one.local.rename("f", "d/g")
    assert world.all_keys() == ["d/", "d/g"]
    renamed = one.local.stat("d/g")
    assert renamed._replace(ctime_ns=before.ctime_ns) == before
    world.later()
    for client in (one, other):
        assert client.local.stat("d/g")._replace(ino=renamed.ino) == renamed
        assert client.local.read("d/g") == b"bytes"
        assert not client.local.exists("f")
    assert one.local.stat("d/g").ino == before.ino


@promise("S-25")
def test_an_unsent_file_is_uploaded_to_the_new_key(world: World, one: Client) -> None:
    """As editors do it: write beside, rename over."""
    world.put("f", b"old")
    with one.local.opened("f.tmp", os.O_WRONLY | os.O_CREAT) as file:
        file.write(b"new")
        one.local.rename("f.tmp", "f")
        assert world.contents() == {"f": b"new"}
        file.write(b"newer")
    assert world.contents() == {"f": b"newer"}


@promise("S-25")
def test_a_changed_file_that_is_renamed_is_whole(world: World, one: Client) -> None:
    """With unsent changes in the middle, the unchanged part is fetched from the old key in time; open files go on."""
    content = bytearray(os.urandom(3 << 20))
    world.put("f", bytes(content))
    world.put("g", bytes(content))
    with one.local.opened("f", os.O_RDWR) as file, one.local.opened("g") as reader:
        file.write(b"XXX", 20_000)
        assert reader.read(0, 4096) == content[:4096]
        one.local.rename("g", "reader")
        assert reader.read() == content
        content[20_000:20_003] = b"XXX"
        one.local.rename("f", "writer")
        assert file.read() == content
        file.write(b"YYY", 40_000)
        content[40_000:40_003] = b"YYY"
    assert world.all_keys() == ["reader", "writer"]
    assert world.body("writer") == content


@promise("S-25")
@pytest.mark.parametrize("opened", [False, True])
def test_an_existing_target_is_replaced_at_once(world: World, one: Client, opened: bool) -> None:
    """At no call to the store is its name without an object, also if large old bytes are kept for who has it open."""
    world.put("f", b"new")
    world.put("g", b"x" * 3000)
    one.keep_small_copies_only(1000)
    one.local.listdir()
    file = one.local.open("g") if opened else None
    present: list[bool] = []
    one.faulty.plan = lambda index, method: present.append("g" in world.all_keys())
    one.local.rename("f", "g")
    assert all(present)
    if file is not None:
        assert file.read() == b"x" * 3000
        file.close()
    assert world.contents() == {"g": b"new"}
    assert one.local.read("g") == b"new"
    assert one.local.listdir() == [b"g"]


@promise("S-25")
@pytest.mark.parametrize("parts", [False, True])
def test_a_rename_that_fails_leaves_the_target(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    """An open target that was to be replaced is as it was. parts: the copy that is kept of it has another ETag."""
    if parts:
        monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 2000)
    world.put("f", b"new")
    world.put("g", b"x" * 3000)
    one.keep_small_copies_only(1000)
    with one.local.opened("g") as file:
        assert file.read(0, 1) == b"x"  # from now on the handle stays on its version (S-147)
        one.local.stat("f")
        copies_seen = iter(range(10))
        last = 0 if parts else 1
        one.faulty.plan = lambda index, method: Fault(DOWN) if method == "copy" and next(copies_seen) == last else None
        failing(errno.EIO, one.local.rename, "f", "g")
        one.faulty.plan = no_faults
        assert file.read() == b"x" * 3000
        assert one.local.read("g") == b"x" * 3000
        assert one.local.read("f") == b"new"
    assert (world.body("f"), world.body("g")) == (b"new", b"x" * 3000)


@promise("S-25")
def test_what_a_rename_refuses(world: World, one: Client) -> None:
    """RENAME_NOREPLACE is honoured, other flags are EINVAL; kinds that do not replace each other, as rename(2) says.

    What is refused leaves nothing in the store.
    """
    world.put_all(["f", "full/x", "deep/full/x"])
    world.put("g", b"old")
    world.put("empty/")
    for flags in (2, 3, 4):
        failing(errno.EINVAL, one.local.rename, "f", "i", flags)
    failing(errno.EEXIST, one.local.rename, "f", "g", 1)
    failing(errno.EISDIR, one.local.rename, "f", "empty")
    failing(errno.ENOTDIR, one.local.rename, "empty", "f")
    failing(errno.ENOTEMPTY, one.local.rename, "empty", "full")
    failing(errno.EINVAL, one.local.rename, "deep/full", "deep/full/y")
    failing(errno.ENOENT, one.local.rename, "absent", "g")
    assert world.all_keys() == ["deep/full/x", "empty/", "f", "full/x", "g"]
    one.local.rename("full", "empty")
    one.local.rename("f", "h", 1)
    assert one.local.listdir() == [b"deep", b"empty", b"g", b"h"]
    assert world.contents() == {"deep/full/x": b"x", "empty/x": b"x", "g": b"old", "h": b"x"}


@promise("S-25")
def test_a_link_replaces_a_file_and_a_file_a_link(world: World, one: Client) -> None:
    """The replaced object has another key then; it goes all the same."""
    world.put("f", b"file")
    one.local.symlink(b"t", "x")
    one.local.rename("x", "f")
    assert world.contents() == {"f.rclonelink": b"t"}
    assert one.local.readlink("f") == b"t"
    one.local.write("g", b"file")
    one.local.rename("g", "f")
    assert world.contents() == {"f": b"file"}
    assert one.local.read("f") == b"file"


@promise("S-25")
@pytest.mark.parametrize("listed", [True, False])
def test_the_old_name_is_gone_when_rename_returns(world: World, one: Client, listed: bool) -> None:
    """Even if the directory was listed, or the name looked up, while the old object was still there."""
    world.put("f", b"x")
    world.put("d/g", b"y")
    one.local.listdir()

    def list_before_removal(index: int, method: str) -> None:
        if method in ("delete", "delete_many"):
            one.fs.core.nodes.root.listing = None
            one.faulty.plan = no_faults
            if listed:
                one.local.scandir(plus=True)
            else:
                one.ask_one_by_one()
                assert one.local.exists("f") == (method == "delete")
                assert one.local.exists("d")
            one.faulty.plan = list_before_removal

    one.faulty.plan = list_before_removal
    one.local.rename("f", "h")
    assert not one.local.exists("f")
    one.local.rename("d", "e")
    assert not one.local.exists("d")
    assert one.local.listdir() == [b"e", b"h"]


@promise("S-26")
def test_a_directory_is_renamed_with_all_below(world: World, one: Client, other: Client) -> None:
    """What others put there goes along, keys that no name can spell included."""
    one.local.mkdir("d", 0o700)
    one.local.mkdir("d/e")
    one.local.write("d/f", b"1")
    one.local.symlink(b"t", "d/x")
    world.put("d//odd", b"2")
    world.put("d/e/../f", b"3")
    world.put("dd/beside", b"4")
    world.later()
    one.local.rename("d", "n")
    assert sorted(world.all_keys()) == sorted(
        ["n/", "n/e/", "n/f", "n/x.rclonelink", "n//odd", "n/e/../f", "dd/beside"]
    )
    for client in (one, other):
        assert stat.S_IMODE(client.local.stat("n").mode) == 0o700
        assert client.local.read("n/f") == b"1"
        assert client.local.readlink("n/x") == b"t"
        assert not client.local.exists("d")
        assert client.local.listdir() == [b"dd", b"n"]


def test_the_rename_of_a_large_tree_lets_others_go_on(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one in which the kernel knows only directories."""
    names = [f"d/{number:03}" for number in range(300)]
    world.put_all([f"{name}/f" for name in names])
    for name in names:
        one.local.stat(name)
    loop = one.fs.core.loop
    pause = Mock(wraps=loop.pause)
    monkeypatch.setattr(loop, "pause", pause)
    monkeypatch.setattr(renames, "_FOLLOWED_AT_ONCE", 50)
    one.local.rename("d", "e")
    assert pause.call_count >= 6


@promise("S-26")
def test_a_directory_of_thousands_of_objects_is_renamed_whole(world: World, one: Client) -> None:
    """Of thousands of objects none is forgotten."""
    for number in range(2100):
        world.put(f"d/{number:04}", b"%d" % number)
    one.local.rename("d", "e")
    assert world.contents() == {f"e/{number:04}": b"%d" % number for number in range(2100)}
    assert one.calls("delete_many") <= 4


@promise("S-46")
@pytest.mark.parametrize("error", [DOWN, TimeoutError()])
def test_a_copy_in_parts_that_is_given_up_leaves_no_upload(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also when no answer of the store was the reason."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    world.put("f", bytes(2000))
    monkeypatch.setattr(type(one.fs.core.store), "upload_part_copy", AsyncMock(side_effect=error))
    with pytest.raises(type(error)):
        resolve(copies.copy_object(one.fs.core, ObjectVersion("f", world.tool.head("f").etag, 2000), "g"))
    one.nothing_left()
    assert world.contents() == {"f": bytes(2000)}


@promise("S-26")
@pytest.mark.parametrize("dies", [False, True])
def test_open_and_unsent_files_below_a_renamed_directory(world: World, one: Client, dies: bool) -> None:
    """Open files go on, and what is unsent is sent to the new key, which also the journal knows."""
    world.put("d/read", b"read me")
    world.put("d/change", b"0123456789")
    reading = one.local.open("d/read")
    changing = one.local.open("d/change", os.O_RDWR)
    changing.write(b"X", 3)
    made = one.local.open("d/new", os.O_WRONLY | os.O_CREAT)
    made.write(b"new")
    one.local.rename("d", "e")
    assert reading.read() == b"read me"
    assert one.local.listdir("e") == [b"change", b"new", b"read"]
    if dies:
        one.again()
    else:
        for file in (reading, changing, made):
            file.close()
    assert world.contents() == {"e/read": b"read me", "e/change": b"012X456789", "e/new": b"new"}


@promise("S-26")
@pytest.mark.parametrize("written", ["new", "changed"])
@pytest.mark.parametrize("theirs", [b"new and longer", b"newer"])
def test_what_another_client_writes_during_the_rename_is_moved_too(
    world: World, one: Client, written: str, theirs: bytes
) -> None:
    """Nothing is removed that was not copied; what was known below is shown as it is, with its new size.

    ETags of theirs come before and after ours in order.
    """
    world.put_all(["d/a", "d/b", "d/c"], b"old")
    assert one.local.stat("d/c").size == 3
    world.put("d/c", theirs)
    name = "aa" if written == "new" else "b"

    def write_before_removal(index: int, method: str) -> None:
        if method == "list_page" and one.calls("copy") >= 3:
            one.faulty.plan = no_faults
            world.put(f"d/{name}", b"written late")

    one.faulty.plan = write_before_removal
    one.local.rename("d", "e")
    expected = {"e/a": b"old", "e/b": b"old", "e/c": theirs} | {f"e/{name}": b"written late"}
    assert world.contents() == expected
    assert one.local.stat("e/c").size == len(theirs)
    world.later()
    for path, body in expected.items():
        assert one.local.stat(path).size == len(body)
        assert one.local.read(path) == body


@promise("S-26", "S-162")
@pytest.mark.parametrize(("size", "theirs"), [(9 << 20, b"n"), (5, b"n"), (5, b"theirs")])
def test_what_another_client_replaced_before_is_not_mixed(world: World, one: Client, size: int, theirs: bytes) -> None:
    """A file with unsent changes of a version that is no more: close is ESTALE, not a mixture.

    Of a small file all bytes are here, so that only its etag tells; theirs come before and after it in order.
    """
    won = theirs * size
    world.put("d/f", b"o" * size)
    file = one.local.open("d/f", os.O_RDWR)
    file.write(b"XXX", 10)
    world.put("d/f", won)
    one.local.rename("d", "e")
    failing(errno.ESTALE, file.close)
    assert world.contents() == {"e/f": won}
    assert [row["path"] for row in one.fs.uploads.unsent()] == ["e/f"]


@promise("S-25", "S-33", "S-162")
@pytest.mark.parametrize("size", [5, 3 << 20, 9 << 20])
def test_a_changed_file_that_another_client_replaced_is_not_renamed(world: World, one: Client, size: int) -> None:
    """Rename and close are ESTALE, what was written is kept, and the other client's file stays."""
    world.put("f", b"o" * size)
    file = one.local.open("f", os.O_RDWR)
    file.write(b"XXX", 10)
    world.put("f", b"theirs")
    for call, arguments in ((one.local.rename, ("f", "g")), (file.close, ())):
        failing(errno.ESTALE, call, *arguments)
        assert world.contents() == {"f": b"theirs"}
        (row,) = one.fs.uploads.unsent()
        assert (row["path"], row["stuck"]) == ("f", call == file.close)


@promise("S-26")
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_a_directory_rename_that_fails_leaves_no_copy(
    world: World, one: Client, number: int, after: bool, target: bool
) -> None:
    """Also of what was copied and not answered: the same rename can be asked for again, onto an empty directory too."""
    one.local.mkdir("d")
    if target:
        one.local.mkdir("e")
    for each in ("x", "y/z"):
        world.put(f"d/{each}", each.encode())
    before = world.all_keys()
    numbers = itertools.count()
    one.faulty.plan = lambda _, method: Fault(DOWN, after) if method == "copy" and next(numbers) == number else None
    failing(errno.EIO, one.local.rename, "d", "e")
    one.faulty.plan = no_faults
    assert world.all_keys() == before
    assert one.fs.core.db.intents() == []
    one.local.rename("d", "e")
    assert world.contents() == {"e/x": b"x", "e/y/z": b"y/z"}


@promise("S-26")
def test_a_directory_rename_that_fails_leaves_what_another_client_put_there(world: World, one: Client) -> None:
    """It is not taken for a copy whose answer was lost."""
    world.put_all(["d/x", "d/y"])

    def plan(_: int, method: str) -> Fault | None:
        if method != "copy":
            return None
        world.put("e/x", b"theirs")
        return Fault(DOWN)

    one.faulty.plan = plan
    failing(errno.EIO, one.local.rename, "d", "e")
    assert world.contents() == {"d/x": b"x", "d/y": b"x", "e/x": b"theirs"}


@promise("S-26")
@promise("S-199")
@pytest.mark.parametrize(
    ("kept", "code"),
    [(AccessDenied("d/x: you may not"), errno.EACCES), (ObjectLocked("d/x: it is locked"), errno.EPERM)],
)
def test_what_the_store_does_not_remove_of_a_renamed_directory_is_told(
    world: World, one: Client, kept: StoreError, code: int
) -> None:
    """With the errno of the store's reason. All of it has its new name by then."""
    world.put_all(["d/x", "d/y"])
    one.faulty.plan = lambda _, method: Fault(alter=lambda _: [kept]) if method == "delete_many" else None
    failing(code, one.local.rename, "d", "e")
    assert {"e/x": b"x", "e/y": b"x"}.items() <= one.local.tree().items()


@promise("S-66")
def test_a_file_whose_rename_failed_at_its_last_step_is_listed_under_both_names(world: World, one: Client) -> None:
    """The copy was made, and the store refuses to remove the original."""
    world.put_all(["d/f"])
    assert one.local.listdir("d") == [b"f"]
    one.faulty.plan = lambda _, method: Fault(AccessDenied("you may not")) if method == "delete" else None
    failing(errno.EACCES, one.local.rename, "d/f", "d/g")
    assert world.all_keys() == ["d/", "d/f", "d/g"]
    world.later(0.01)
    assert sorted(one.local.listdir("d")) == [b"f", b"g"]
    assert one.local.read("d/f") == one.local.read("d/g") == b"x"
    assert one.fs.core.db.intents() == []


@promise("S-25")
def test_a_file_that_may_not_be_removed_keeps_its_name_and_its_copy_goes(world: World, one: Client) -> None:
    """Another right holds where it was to be moved. Who has the file open, or opens it, has the original."""
    world.put_all(["d/f"])
    before, refused = one.local.stat("d/f"), itertools.chain([Fault(AccessDenied("no"))], itertools.repeat(None))
    one.faulty.plan = lambda _, method: next(refused) if method == "delete" else None
    with one.local.opened("d/f", os.O_RDWR) as file:
        failing(errno.EACCES, one.local.rename, "d/f", "g")
        assert world.contents() == {"d/f": b"x"}
        file.write(b"mine")
    assert world.contents() == {"d/f": b"mine"}
    assert (one.local.stat("d/f").ino, one.local.exists("g")) == (before.ino, False)
    one.local.rename("d/f", "g")
    assert world.contents() == {"g": b"mine"}


@promise("S-25")
@pytest.mark.parametrize(("first", "code"), [(None, errno.ENOENT), (b"newer", errno.ESTALE)])
def test_a_file_that_another_client_removes_during_its_rename(
    world: World, one: Client, first: bytes | None, code: int
) -> None:
    """It is gone from both names, and nothing is left to be done. first: what the other client writes before that."""

    def remove() -> None:
        world.tool.delete("f")

    def write_and_remove() -> None:
        world.put("f", b"newer")
        one.before_next("head", remove)

    world.put("f", b"bytes")
    one.local.stat("f")
    one.before_next("copy", write_and_remove if first else remove)
    failing(code, one.local.rename, "f", "g")
    assert world.all_keys() == []
    assert one.fs.core.db.intents() == []
    world.later()
    assert one.local.listdir() == []


@promise("S-26")
@pytest.mark.parametrize("gone", ["d", "into"])
def test_a_directory_that_another_client_removes_during_a_rename(world: World, one: Client, gone: str) -> None:
    """And of which that is seen meanwhile: it is not made again."""
    one.local.mkdir("d")
    one.local.mkdir("into")
    world.later()

    def remove() -> None:
        world.tool.delete(f"{gone}/")
        world.later()
        assert not one.local.exists(gone)

    one.local.stat("d")
    one.before_next("list_page", remove)
    failing(errno.ENOENT, one.local.rename, "d", "into/e")
    assert world.all_keys() == ["into/" if gone == "d" else "d/"]


@promise("S-26")
@pytest.mark.parametrize("request_name", ["list_page", "head"])
@pytest.mark.parametrize("large", [False, True])
def test_an_answer_about_old_keys_is_none_about_the_new(
    world: World, one: Client, request_name: str, large: bool
) -> None:
    """An answer about the old keys is not taken for one about the new: open files and names stay."""
    world.put("d/f", b"bytes")
    world.put("d/g", b"more")
    file = one.local.open("d/f")
    directory = one.local.stat("d").ino
    if large:
        one.ask_one_by_one("d")
    world.later()
    one.before_next(request_name, lambda: one.local.rename("d", "e"))
    for name in (b"f", b"g"):
        entry = resolve(one.fs.lookup(ME, directory, name))
        assert entry.attr is not None
    assert file.read() == b"bytes"
    assert file.stat().nlink == 1
    assert one.local.stat("e/f").ino == file.ino
    assert one.local.listdir("e") == [b"f", b"g"]
    file.close()


@promise("S-190", "S-25")
@pytest.mark.parametrize("directory", [False, True])
def test_a_node_forgotten_during_its_rename_has_the_new_name(world: World, one: Client, directory: bool) -> None:
    """A process that is killed does not wait for its rename, which goes on."""
    world.put("x", b"old")
    world.put("x.new/f" if directory else "x.new", b"new")
    if directory:
        world.tool.delete("x")
    ino = one.local.stat("x.new").ino
    one.before_next("copy", lambda: one.fs.forget(ino, 1_000))
    one.local.rename("x.new", "x")
    for _ in range(2):
        assert one.local.read("x/f" if directory else "x") == b"new"
        assert not one.local.exists("x.new")
        world.later()
