"""The file system over a real export, driven without a kernel: lost answers, deaths, a host that forgets."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore.api.source import NFSLocation
from datastore.fuse.nfs import writes
from datastore.fuse.ops import ROOT_INO, Caller, Fh, Ino, OpenRequest, SetAttr
from tests.driving import resolve
from tests.localfs import File, LocalFs
from tests.mount.mounts import error_of, fails
from tests.nfs.clients import ROOT, Here, served
from tests.nfs.host.server import NFSServer
from tests.nfs.mounts import digest, on_the_host
from tests.nfs.rpcproxy import RpcProxy, proxied
from tests.patience import eventually
from tests.promises import promise

pytestmark = pytest.mark.timeout(900)

MIB = 1 << 20


@pytest.fixture
def path(export: Callable[..., str]) -> str:
    return export()


@pytest.fixture
def location(nfs_host: NFSServer, path: str) -> NFSLocation:
    return NFSLocation(server=nfs_host.address, path=path)


@pytest.fixture
def here(location: NFSLocation, tmp_path: Path) -> Iterator[Here]:
    with served(location, tmp_path / "state") as made:
        yield made


@pytest.fixture
def proxy(nfs_host: NFSServer) -> Iterator[RpcProxy]:
    with proxied(nfs_host) as made:
        yield made


CHANGES: dict[str, tuple[tuple[str, ...], Callable[[LocalFs], None]]] = {
    "mkdir": (("mkdir",), lambda fs: fs.mkdir("new", 0o750)),
    "symlink": (("symlink",), lambda fs: fs.symlink(b"target", "new")),
    "mknod": (("mknod",), lambda fs: fs.mknod("new", stat.S_IFIFO | 0o600)),
    "exclusive create": (("create",), lambda fs: fs.open("new", os.O_CREAT | os.O_EXCL).close()),
    "write": (("create", "write", "commit"), lambda fs: fs.write("new", b"content")),
    "rename": (("rename",), lambda fs: fs.rename("old", "new")),
    "unlink": (("remove",), lambda fs: fs.unlink("old")),
    "rmdir": (("rmdir",), lambda fs: fs.rmdir("empty")),
    "truncate": (("setattr",), lambda fs: fs.truncate("old", 1)),
}


@promise("S-261")
@pytest.mark.parametrize("what", ["request", "answer"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_made_once_whatever_is_lost(
    proxy: RpcProxy, path: str, tmp_path: Path, change: str, what: str
) -> None:
    """The connection breaks before or after each call of it, and no program hears of that."""
    location = NFSLocation(server=proxy.host, path=path, port=proxy.port, mount_port=proxy.mount_port)
    calls, run = CHANGES[change]
    with served(location, tmp_path / "plain") as here:
        trees = []
        for losing in (False, True):
            here.local.write("old", b"old content")
            here.local.mkdir("empty")
            if losing:
                proxy.lose(what, *calls)
            run(here.local)
            trees.append(here.local.tree())
            for name in here.local.tree():
                (here.local.rmdir if name.endswith("/") else here.local.unlink)(name.rstrip("/"))
        assert trees[0] == trees[1]
        assert here.client.reconnects >= 1


@promise("S-263")
def test_an_exclusive_create_of_another_is_told_from_our_own(proxy: RpcProxy, path: str, tmp_path: Path) -> None:
    """Also where the connection broke."""
    location = NFSLocation(server=proxy.host, path=path, port=proxy.port, mount_port=proxy.mount_port)
    with served(location, tmp_path / "one") as one, served(location, tmp_path / "two") as two:
        resolve(one.fs.lookup(ROOT, ROOT_INO, b"new"))
        two.local.open("new", os.O_CREAT | os.O_EXCL).close()
        proxy.lose("request", "create")
        request = OpenRequest(flags=os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        fails(errno.EEXIST, lambda: resolve(one.fs.create(ROOT, ROOT_INO, b"new", 0o100644, request)))


@promise("S-261", "S-265")
def test_an_open_file_that_is_removed_is_kept_when_the_answer_is_lost(
    proxy: RpcProxy, path: str, tmp_path: Path
) -> None:
    location = NFSLocation(server=proxy.host, path=path, port=proxy.port, mount_port=proxy.mount_port)
    with served(location, tmp_path / "state") as here:
        here.local.write("f", b"one")
        here.local.write("g", b"two")
        with here.local.opened("f") as removed, here.local.opened("g") as replaced:
            proxy.lose("answer", "rename")
            here.local.unlink("f")
            proxy.lose("answer", "link", "rename")
            here.local.write("h", b"three")
            here.local.rename("h", "g")
            assert (removed.read(), replaced.read()) == (b"one", b"two")
            assert here.local.read("g") == b"three"
        assert here.local.listdir() == [b"g"]


def again(here: Here, location: NFSLocation, state: Path) -> Here:
    """The process dies, and another one goes on."""
    here.die()
    return Here(location, state, resumed=True)


def commits(here: Here) -> int:
    """How often the host was asked to commit."""
    return int(here.client.metrics.snapshot().get("commit", {"calls": 0})["calls"])


def moved(file: File, to: Here) -> File:
    """The same open file, at the new process."""
    return File(to.fs, file.ino, file._fh)


@promise("S-260")
def test_a_new_process_goes_on_with_the_same_files(location: NFSLocation, tmp_path: Path) -> None:
    """Node ids, open files and those that were removed."""
    here = Here(location, tmp_path)
    here.local.mkdir("d")
    here.local.write("d/f", b"f" * 100_000)
    here.local.write("d/g", b"g")
    inos = {name: here.local.stat(name).ino for name in ("d", "d/f")}
    reading, removed = here.local.open("d/f"), here.local.open("d/g", os.O_RDWR)
    here.local.unlink("d/g")
    writing = here.local.open("d/new", os.O_CREAT | os.O_RDWR)
    writing.write(b"before")
    here = again(here, location, tmp_path)
    reading, removed, writing = (moved(file, here) for file in (reading, removed, writing))
    assert {name: here.local.stat(name).ino for name in ("d", "d/f")} == inos
    assert reading.read() == b"f" * 100_000
    removed.write(b"h", 1)
    assert removed.read() == b"gh"
    assert removed.stat().nlink == 0
    writing.write(b" after", 6)
    for file in (reading, removed, writing):
        file.close()
    assert here.local.listdir("d") == [b"f", b"new"]
    assert here.local.read("d/new") == b"before after"
    resolve(here.fs.stop())


@promise("S-260", "S-265")
@pytest.mark.parametrize("procedure", ["rename", "link"])
def test_a_process_that_dies_before_it_has_kept_a_removed_file_loses_nothing(
    location: NFSLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, procedure: str
) -> None:
    """It has noted the other name, and the kernel asks the next process once more."""
    here = Here(location, tmp_path)
    here.local.write("f", b"content")
    here.local.write("g", b"newer")
    file = here.local.open("f")
    call = here.client.call

    def dies(request: Any, identity: Any = None) -> Any:
        if request.procedure == procedure:
            raise SystemExit
        return call(request, identity)

    def take_away(fs: LocalFs) -> None:
        fs.unlink("f") if procedure == "rename" else fs.rename("g", "f")

    monkeypatch.setattr(here.client, "call", dies)
    with pytest.raises(SystemExit):
        take_away(here.local)
    here = again(here, location, tmp_path)
    file = moved(file, here)
    take_away(here.local)
    assert any(name.startswith(b".nfs") for name in here.local.listdir())
    assert file.read() == b"content"
    assert file.stat().nlink == 0
    file.close()
    assert here.local.listdir() == ([b"g"] if procedure == "rename" else [b"f"])
    resolve(here.fs.stop())


@promise("S-265")
def test_a_removed_file_whose_other_name_is_removed_too_has_no_name(location: NFSLocation, tmp_path: Path) -> None:
    """By another client, which can't know that it is open; the host may still have the file."""
    with served(location, tmp_path / "one") as here, served(location, tmp_path / "two") as other:
        here.local.write("f", b"content")
        with here.local.opened("f") as file:
            here.local.unlink("f")
            (name,) = here.local.listdir()
            other.local.unlink(os.fsdecode(name))
            assert file.stat().nlink == 0


@promise("S-265")
def test_the_next_mount_removes_what_a_dead_one_had_hidden(location: NFSLocation, tmp_path: Path) -> None:
    here = Here(location, tmp_path)
    here.local.write("f", b"1")
    here.local.open("f")
    here.local.unlink("f")
    assert [name[:4] for name in here.local.listdir()] == [b".nfs"]
    here.die()
    with served(location, tmp_path) as fresh:
        assert fresh.local.listdir() == []


@promise("S-262")
def test_what_the_host_forgot_is_written_again(
    nfs_host: NFSServer, here: Here, path: str, location: NFSLocation
) -> None:
    """Its power is cut while it has bytes of open files in its memory only."""
    block = os.urandom(MIB)
    file = here.local.open("f", os.O_CREAT | os.O_RDWR)
    for number in range(8):
        file.write(block[number:] + block[:number], number * MIB)
    file.truncate(7 * MIB + 10)
    file.write(b"over", 3 * MIB)
    nfs_host.reboot(orderly=False)
    file.write(b"new", MIB)
    expected = file.read()
    assert len(expected) == 7 * MIB + 10
    file.close()
    nfs_host.reboot(orderly=False)
    assert on_the_host(nfs_host, path) == {"f": digest(expected)}


@promise("S-262")
def test_nobody_reads_what_the_host_has_not_got_back_yet(
    nfs_host: NFSServer, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its power is cut under a read, whose answer comes from before it has everything again."""
    file = here.local.open("f", os.O_CREAT | os.O_RDWR)
    file.write(b"x" * 100_000)
    here.client.on_reconnect = lambda: None
    gather = here.client.gather
    cuts = iter([True])

    def cut(requests: Any, credentials: Any = None) -> Any:
        if requests[0].procedure != "read" or not next(cuts, False):
            return gather(requests, credentials)
        nfs_host.reboot(orderly=False)
        answers = gather(requests, credentials)
        assert answers[0].content != b"x" * 100_000
        assert here.fs.flush_all() == []  # another thread has brought it back meanwhile
        return answers

    monkeypatch.setattr(here.client, "gather", cut)
    assert resolve(here.fs.read(file.ino, Fh(file._fh), 0, 100_000)) == b"x" * 100_000
    file.close()


@promise("S-262")
def test_nobody_reads_what_is_just_being_written_again(
    nfs_host: NFSServer, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = here.local.open("f", os.O_CREAT | os.O_RDWR)
    file.write(b"one")
    file.write(b"two", 3)
    here.client.on_reconnect = lambda: None
    nfs_host.reboot(orderly=False)
    gather, seen = here.client.gather, []
    reads = threading.Thread(target=lambda: seen.append(file.read()))

    def writing_again(requests: Any, credentials: Any = None) -> Any:
        if requests[0].procedure == "write" and not reads.ident:
            reads.start()
            reads.join(1.0)  # it has to wait for us
        return gather(requests, credentials)

    monkeypatch.setattr(here.client, "gather", writing_again)
    assert here.fs.flush_all() == []
    reads.join(60.0)
    assert seen == [b"onetwo"]
    file.close()


@promise("S-262")
def test_when_host_and_process_forget_the_program_is_told(
    nfs_host: NFSServer, location: NFSLocation, tmp_path: Path
) -> None:
    """Once, at its next fsync or close; a file that the host had on its disk is not concerned."""
    here = Here(location, tmp_path)
    lost, kept = (here.local.open(name, os.O_CREAT | os.O_RDWR) for name in ("lost", "kept"))
    lost.write(b"x" * 1000)
    kept.write(b"y" * 1000)
    here.die()
    nfs_host.reboot(orderly=False)
    here = Here(location, tmp_path, resumed=True)
    lost = moved(lost, here)
    fails(errno.EIO, lost.fsync)
    lost.write(b"z" * 1000)
    lost.close()
    assert here.local.read("lost") == b"z" * 1000
    resolve(here.fs.stop())


@promise("S-260", "S-265")
@pytest.mark.parametrize("how", ["open", "create"])
def test_an_open_that_was_done_and_not_answered_is_done_once(location: NFSLocation, tmp_path: Path, how: str) -> None:
    """The kernel sends it again to the next process, and closes it once: what is removed meanwhile goes with that."""
    caller, request = ROOT._replace(request=8), OpenRequest(flags=os.O_RDWR)

    def opened(here: Here) -> Fh:
        if how == "open":
            return resolve(here.fs.open(caller, here.local.stat("f").ino, request)).fh
        return resolve(here.fs.create(caller, ROOT_INO, b"f", 0o100644, request))[1].fh

    here = Here(location, tmp_path)
    here.local.write("f", b"1")
    opened(here)
    here = again(here, location, tmp_path)
    handle, ino = opened(here), here.local.stat("f").ino
    here.local.unlink("f")
    assert len(here.local.listdir()) == 1
    resolve(here.fs.release(ino, handle))
    assert here.local.listdir() == []
    resolve(here.fs.stop())


@promise("S-262")
def test_nothing_is_lost_of_a_file_that_was_only_opened(location: NFSLocation, tmp_path: Path) -> None:
    """An earlier mount with this state directory had written to a host that has restarted since."""
    (tmp_path / "verifier").write_text("1")
    here = Here(location, tmp_path)
    file = here.local.open("f", os.O_CREAT | os.O_RDWR)
    here = again(here, location, tmp_path)
    moved(file, here).close()
    resolve(here.fs.stop())


@promise("S-260", "S-262")
def test_a_process_that_dies_loses_nothing(
    nfs_host: NFSServer, location: NFSLocation, tmp_path: Path, path: str
) -> None:
    """The next one has the host commit what the first one wrote, at once."""
    here = Here(location, tmp_path)
    file = here.local.open("f", os.O_CREAT | os.O_RDWR)
    file.write(b"x" * 1000)
    here = again(here, location, tmp_path)
    eventually(lambda: not here.fs.unstored(silent=True), "what was open is committed")
    nfs_host.reboot(orderly=False)
    moved(file, here).close()
    assert on_the_host(nfs_host, path) == {"f": digest(b"x" * 1000)}
    resolve(here.fs.stop())


@promise("S-262")
def test_what_is_kept_for_the_host_has_a_limit(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "UNCOMMITTED_BYTES", 4 * MIB)
    file = here.local.open("f", os.O_CREAT | os.O_RDWR)
    for number in range(12):
        file.write(bytes(MIB), number * MIB)
        assert sum(each.bytes for each in here.fs.unstored(silent=True)) <= 4 * MIB
    assert 2 <= commits(here) <= 4
    file.close()
    assert sum(each.bytes for each in here.fs.unstored(silent=True)) == 0


@promise("S-266")
def test_the_kernel_hears_of_others_changes_only(here: Here, location: NFSLocation, tmp_path: Path) -> None:
    here.local.write("f", b"1" * 5000)
    with here.local.opened("f", os.O_RDWR) as file:
        file.read()
        for number in range(20):
            file.write(b"2" * 100, number * 100)
            file.read()
        assert here.kernel.inodes == []
        with served(location, tmp_path / "other") as other:
            other.local.write("f", b"3" * 4999)  # another size: the host's clock may stand still for a moment
            assert file.read() == b"3" * 4999
        assert here.kernel.inodes == [(file.ino, 0)]


@promise("S-266")
def test_pages_are_kept_from_one_open_to_the_next(here: Here, location: NFSLocation, tmp_path: Path) -> None:
    """Unless somebody else has changed the file."""
    here.local.write("f", b"1" * 5000)
    ino = here.local.stat("f").ino
    resolve(here.fs.lookup(ROOT, ROOT_INO, b"f"))

    def kept() -> bool:
        opened = resolve(here.fs.open(ROOT, ino, OpenRequest(flags=os.O_RDONLY)))
        resolve(here.fs.release(ino, opened.fh))
        return opened.keep_cache

    kept()
    assert kept()
    with served(location, tmp_path / "other") as other:
        other.local.setattr("f", SetAttr(size=4999))
    assert [kept(), kept()] == [False, True]


@promise("S-267")
def test_a_file_that_another_client_removed_is_stale(here: Here, location: NFSLocation, tmp_path: Path) -> None:
    """For who has it open; the name shows what is there now."""
    here.local.write("f", b"old")
    with here.local.opened("f") as file, served(location, tmp_path / "other") as other:
        other.local.unlink("f")
        other.local.write("f", b"new")
        # The host's own cache of open files holds it for some seconds more.
        eventually(lambda: error_of(file.read) == errno.ESTALE, "the handle is stale")
        assert here.local.read("f") == b"new"


@promise("S-264")
def test_a_group_is_shown_and_may_do_what_the_owner_may(here: Here) -> None:
    """A pod's fsGroup."""
    here.local.write("f", b"1")
    here.local.chmod("f", 0o640)
    here.fs.apply(replace(here.spec, group=4321))
    shown = here.local.stat("f")
    assert (shown.gid, stat.S_IMODE(shown.mode)) == (4321, 0o660)
    assert here.kernel.inodes
    here.local.mkdir("d", 0o770)
    here.local.setattr("d", SetAttr(gid=4321))
    pod = LocalFs(here.fs, Caller(1001, 1001, 0))  # of another pid namespace: its groups can't be told
    pod.write("d/f", b"2")
    here.fs.apply(here.spec)
    with pytest.raises(PermissionError):
        pod.write("d/g", b"3")


@promise("S-271")
def test_the_kernel_is_asked_for_nodes_beyond_the_limit(location: NFSLocation, tmp_path: Path) -> None:
    with served(location, tmp_path / "state", limit=50) as here:
        for number in range(80):
            here.local.write(f"{number:02}", b"")
        held = here.local.open("00")
        here.local.lookup("79")
        asked = {one.ino for one in here.kernel.released}
        assert len(asked) >= 20
        assert held.ino not in {one.ino for one in here.kernel.released[-20:]}
        for ino in asked:
            here.fs.forget(Ino(ino), 1 << 30)
        assert int(str(here.fs.status()["nodes"])) <= 81
        assert here.local.read("05") == b""
