"""The client against real servers: the kernel's and Ganesha's, over networks that fail."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datastore.api.source import NFSLocation
from datastore.backends.nfs import ganesha as ganesha_backend
from datastore.backends.nfs.parameters import parse_ganesha
from datastore.errors import AccessDenied, DeadlineExceeded, NotFound, Unreachable
from datastore.fuse.nfs import calls
from datastore.fuse.nfs.calls import NFSError
from datastore.fuse.nfs.client import OUTAGE_S, Client, Credentials
from datastore.fuse.ops import NOW, SetAttr
from tests.nfs.clients import CONNECT_S, connected
from tests.nfs.host.bed import Bed
from tests.nfs.host.ganesha import Ganesha
from tests.nfs.host.guest import CHECKOUT
from tests.nfs.host.network import GATEWAY
from tests.nfs.host.server import FOR_ALL, NFSServer
from tests.nfs.mounts import mounted
from tests.nfs.rpcproxy import proxied
from tests.patience import eventually
from tests.promises import promise

pytestmark = pytest.mark.timeout(900)

ROOT, ALICE = Credentials(0, 0), Credentials(1001, 1001)
NEW_FILE = SetAttr(mode=0o644, size=0)
RECOVERED_S = 400.0
"""For a kernel's client to find its server again: its pauses double, to as long again as the outage was."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def ganesha(nfs_bed: Bed) -> Iterator[Ganesha]:
    server = Ganesha(nfs_bed.add_client())
    server.claim(64 * MIB)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["knfsd", "ganesha"])
def location(request: pytest.FixtureRequest, export: Callable[..., str], nfs_host: NFSServer) -> NFSLocation:
    """An empty directory of each server."""
    if request.param == "knfsd":
        return NFSLocation(server=nfs_host.address, path=export())
    ganesha: Ganesha = request.getfixturevalue("ganesha")
    # Not one that was emptied behind its back: it keeps what it knows of names.
    path = f"{ganesha.path}/{request.node.name.partition('[')[0]}"
    ganesha.guest.shell(f"mkdir -m 0777 {path}; chmod 0777 {path}")
    return NFSLocation(server=ganesha.address, path=path)


@pytest.fixture
def client(location: NFSLocation) -> Iterator[Client]:
    with connected(location) as made:
        yield made


@promise("S-263")
def test_files_and_their_attributes(client: Client) -> None:
    """What is set is what is told."""
    made = client.call(calls.create(client.root, b"f", NEW_FILE))
    content = os.urandom(100_000)
    written = client.call(calls.write(made.handle, 5, content))
    assert (written.taken, written.stable) == (len(content), False)
    assert client.call(calls.commit(made.handle)) == written.verifier
    whole = client.call(calls.read(made.handle, 0, 200_000))
    assert whole.content == bytes(5) + content
    assert whole.end
    assert client.call(calls.read(made.handle, 200_000, 10)).content == b""
    changes = SetAttr(mode=0o600, uid=7, gid=8, size=6, atime_ns=1_000_000_001, mtime_ns=2_000_000_000)
    client.call(calls.setattr(made.handle, changes))
    seen = client.call(calls.getattr(made.handle))
    assert (seen.mode, seen.uid, seen.gid, seen.size, seen.nlink) == (stat.S_IFREG | 0o600, 7, 8, 6, 1)
    assert (seen.atime_ns, seen.mtime_ns) == (1_000_000_001, 2_000_000_000)
    client.call(calls.setattr(made.handle, SetAttr(mtime_ns=NOW, atime_ns=-(10**18))))
    later = client.call(calls.getattr(made.handle))
    assert later.mtime_ns > 1e18
    assert later.atime_ns == 0  # the nearest time that there is
    assert client.call(calls.lookup(client.root, b"f")).handle == made.handle


@promise("S-263")
def test_names(client: Client) -> None:
    file = client.call(calls.create(client.root, b"f", NEW_FILE)).handle
    directory = client.call(calls.mkdir(client.root, b"d", SetAttr(mode=0o750))).handle
    link = client.call(calls.symlink(client.root, b"s", b"to/some where")).handle
    assert client.call(calls.readlink(link)) == b"to/some where"
    client.call(calls.link(file, directory, b"hard"))
    assert client.call(calls.getattr(file)).nlink == 2
    client.call(calls.rename(client.root, b"f", directory, b"g"))
    fifo = client.call(calls.mknod(client.root, b"p", stat.S_IFIFO | 0o600, 0, SetAttr(mode=0o600)))
    device = client.call(calls.mknod(client.root, b"b", stat.S_IFBLK, os.makedev(8, 300), SetAttr(mode=0o600)))
    kinds = {stat.S_IFMT(client.call(calls.getattr(each.handle)).mode) for each in (fifo, device)}
    assert kinds == {stat.S_IFIFO, stat.S_IFBLK}
    rdev = client.call(calls.getattr(device.handle)).rdev
    assert (os.major(rdev), os.minor(rdev)) == (8, 300)
    lines = client.call(calls.readdir(directory, 0, 0, 65536))
    assert lines.end
    names = {line.name: line.handle for line in lines.lines}
    assert names[b"hard"] == names[b"g"] == file
    for name in (b"s", b"p", b"b"):
        client.call(calls.remove(client.root, name))
    assert code(client, calls.rmdir(client.root, b"d")) == errno.ENOTEMPTY
    client.call(calls.remove(directory, b"hard"))
    client.call(calls.remove(directory, b"g"))
    client.call(calls.rmdir(client.root, b"d"))
    assert code(client, calls.getattr(file)) == errno.ESTALE


def test_a_large_directory_is_read_in_parts(client: Client) -> None:
    names = {b"%04d-%s" % (number, b"x" * 100) for number in range(600)}
    client.gather([calls.create(client.root, name, NEW_FILE) for name in names])
    seen: list[bytes] = []
    cookie = verifier = parts = 0
    while True:
        part = client.call(calls.readdir(client.root, cookie, verifier, 32 << 10))
        seen += [line.name for line in part.lines]
        parts += 1
        if part.end:
            break
        cookie, verifier = part.lines[-1].cookie, part.verifier
    assert sorted(set(seen) - {b".", b".."}) == sorted(names)
    assert len(seen) == len(set(seen))
    assert parts > 2


@promise("S-263")
def test_errors_are_the_servers(client: Client) -> None:
    made = client.call(calls.create(client.root, b"f", NEW_FILE)).handle
    assert code(client, calls.lookup(client.root, b"none")) == errno.ENOENT
    assert code(client, calls.mkdir(client.root, b"f", SetAttr(mode=0o755))) == errno.EEXIST
    assert code(client, calls.lookup(made, b"x")) == errno.ENOTDIR
    assert code(client, calls.rmdir(client.root, b"f")) == errno.ENOTDIR
    assert code(client, calls.symlink(client.root, b"s", b"x" * 5000)) == errno.ENAMETOOLONG
    assert code(client, calls.setattr(made, SetAttr(mode=0o777)), ALICE) in (errno.EPERM, errno.EACCES)
    assert code(client, calls.getattr(b"\0" * 20)) in (errno.ESTALE, errno.EIO)
    assert client.reconnects == 0  # none of these broke the connection


@promise("S-263")
def test_an_exclusive_create_is_made_once(client: Client) -> None:
    """With its mode, and with an access time that tells whose it is."""
    stamp = time.time_ns()
    new = SetAttr(mode=0o640, atime_ns=stamp)
    made = client.call(calls.create(client.root, b"x", new, exclusive=True))
    attributes = client.call(calls.getattr(made.handle))
    assert (stat.S_IMODE(attributes.mode), attributes.atime_ns) == (0o640, stamp)
    assert code(client, calls.create(client.root, b"x", new, exclusive=True)) == errno.EEXIST


@promise("S-264")
def test_the_caller_and_his_groups_are_told(client: Client) -> None:
    directory = client.call(calls.mkdir(client.root, b"d", SetAttr(mode=0o770))).handle
    client.call(calls.setattr(directory, SetAttr(gid=5555, mode=0o770)))
    assert code(client, calls.create(directory, b"f", NEW_FILE), ALICE) == errno.EACCES
    many = tuple(range(6000, 6015))
    made = client.call(calls.create(directory, b"f", NEW_FILE), ALICE._replace(groups=(*many, 5555)))
    attributes = client.call(calls.getattr(made.handle))
    assert (attributes.uid, attributes.gid) == (1001, 1001)
    # AUTH_SYS has room for 16; the 17th is not told.
    assert code(client, calls.create(directory, b"g", NEW_FILE), ALICE._replace(groups=(*many, 6015, 5555)))
    granted, _ = client.call(calls.access(directory, calls.READ | calls.MODIFY), ALICE)
    assert granted == 0


def test_many_calls_are_in_flight_from_many_threads(client: Client) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            identity = Credentials(2000 + number, 2000)
            names = [b"%d-%d" % (number, each) for each in range(20)]
            made = client.gather([calls.create(client.root, name, NEW_FILE) for name in names], identity)
            contents = [os.urandom(70_000) for _ in made]
            client.gather([calls.write(m.handle, 0, c) for m, c in zip(made, contents, strict=True)], identity)
            read = client.gather([calls.read(m.handle, 0, 100_000) for m in made], identity)
            assert [each.content for each in read] == contents
            owners = {each.uid for each in client.gather([calls.getattr(m.handle) for m in made])}
            assert owners == {identity.uid}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


@promise("S-261")
def test_a_server_that_is_killed_is_waited_for(ganesha: Ganesha) -> None:
    with connected(NFSLocation(server=ganesha.address, path=ganesha.path)) as client:
        handle = client.call(calls.create(client.root, b"kept", NEW_FILE)).handle
        ganesha.kill()
        again = threading.Timer(1.0, ganesha.start)
        again.start()
        try:
            assert client.call(calls.getattr(handle)).size == 0
            assert client.reconnects == 1
        finally:
            again.join()


@promise("S-293")
def test_the_kernels_client_mounts_ganesha_by_version_4_1(ganesha: Ganesha) -> None:
    """Beside libnfs and its version 3; what is open goes on when the server is killed and comes back."""
    place, path = "/mnt/ganesha", f"{ganesha.path}/by-kernel"
    ganesha.guest.shell(
        f"mkdir -p -m 0777 {path} {place}; mount -t nfs -o vers=4.1,hard {ganesha.address}:{ganesha.path} {place}"
    )
    try:
        assert "vers=4.1" in ganesha.guest.shell(f"grep ' {place} ' /proc/self/mounts")
        ganesha.guest.shell(f"echo one >{place}/by-kernel/f")
        with connected(NFSLocation(server=ganesha.address, path=path)) as client:
            file = client.call(calls.lookup(client.root, b"f")).handle
            assert client.call(calls.read(file, 0, 10)).content == b"one\n"
        reader = f"exec 3<>{place}/by-kernel/f; touch {path}/open; while [ -e {path}/open ]; do sleep 0.1; done"
        ganesha.guest.shell(f"({reader}; cat <&3; echo $?) >/tmp/read-on 2>&1 &")
        eventually(lambda: ganesha.guest.shell(f"ls {path}") == "f\nopen\n", "the file is open")
        ganesha.kill()
        ganesha.guest.shell(f"rm {path}/open")
        ganesha.start()
        eventually(lambda: ganesha.guest.shell("cat /tmp/read-on") == "one\n0\n", "the open file is read", RECOVERED_S)
    finally:
        ganesha.guest.shell(f"umount -l {place}")


@promise("S-295")
def test_what_a_claim_has_grown_to_is_seen_by_mounts_that_run(ganesha: Ganesha, clean_environment: Path) -> None:
    """By the kernel's client and by ours, without a new mount."""
    place, guest = "/mnt/grows", ganesha.guest
    guest.shell(f"mkdir -p {place}; mount -t nfs -o vers=4.1,hard {ganesha.address}:{ganesha.path} {place}")
    try:
        with mounted(guest, ganesha.path, clean_environment) as mount:

            def sizes() -> list[int]:
                seen = os.statvfs(mount.path)
                by_kernel = guest.shell(f"df --output=size --block-size=1 {place} | tail -n 1")
                return [seen.f_blocks * seen.f_frsize, int(by_kernel)]

            before = sizes()
            assert all(each < 64 * MIB for each in before)
            ganesha.grow(128 * MIB)
            eventually(lambda: min(sizes()) > 100 * MIB, f"both see it: {before}")
    finally:
        guest.shell(f"umount -f {place}")


@promise("S-298")
@pytest.mark.parametrize(
    "given",
    [
        {"squash": "root", "clients": "10.99.0.0/24, fd00::/8", "group": str(2**32 - 2)},
        {"squash": "all", "clients": "0.0.0.0/0", "group": "2000"},
        {"squash": "all", "clients": "::/0", "group": "2000"},
        {"squash": "all", "clients": ", ".join(f"10.{number}.0.0/16" for number in range(100))},
    ],
    ids=["root", "everybody", "everybody of version 6", "many"],
)
def test_what_the_controller_writes_is_what_ganesha_takes(ganesha: Ganesha, given: dict[str, str]) -> None:
    """Whatever a class may say, before any pod loads it; and the pod's own probe sees the export."""
    named = {"provisioner": "ganesha", "namespace": "exports", "claimStorageClass": "ssd"}
    text = ganesha_backend.configuration(f"uid-{given}", parse_ganesha({**named, **given}))
    guest = ganesha.guest
    ganesha.stop()
    try:
        guest.shell("mkdir -p /volume/data /volume/ganesha")
        ganesha.launch(text)
        probe = f"{CHECKOUT}/.venv/bin/python -I -S {CHECKOUT}/datastore/backends/nfs/ganeshapod.py probe"
        eventually(lambda: guest.shell(f"{probe} >&2 && echo served || true") != "", "the probe's answer")
        assert ganesha.complaints() == []
    finally:
        ganesha.kill()
        ganesha.start()


@promise("S-267")
def test_an_export_that_is_away_for_a_moment_is_waited_for(nfs_host: NFSServer, export: Callable[..., str]) -> None:
    """A host that serves before it exports."""
    path = export()
    with connected(NFSLocation(server=nfs_host.address, path=path)) as client:
        handle = client.call(calls.create(client.root, b"f", NEW_FILE)).handle
        nfs_host.shell("exportfs -ua; exportfs -f")
        exporting = threading.Event()

        def export_again() -> None:
            exporting.set()
            nfs_host.shell("exportfs -ar")

        back = threading.Timer(1.5, export_again)
        back.start()
        try:
            assert client.call(calls.getattr(handle)).size == 0
            assert exporting.is_set()
        finally:
            back.join()
        client.call(calls.remove(client.root, b"f"))
        assert code(client, calls.getattr(handle)) == errno.ESTALE  # of one file it is said at once


@promise("S-261")
@pytest.mark.parametrize("what", ["request", "answer"])
def test_what_is_lost_is_sent_again(nfs_host: NFSServer, export: Callable[..., str], what: str) -> None:
    """A call that was lost on its way, or whose answer was, is made again and says so."""
    path = export()
    with (
        proxied(nfs_host) as proxy,
        connected(NFSLocation(server=proxy.host, path=path, port=proxy.port, mount_port=proxy.mount_port)) as client,
    ):
        proxy.lose(what, "mkdir", times=2)
        if what == "request":
            client.call(calls.mkdir(client.root, b"d", SetAttr(mode=0o755)))
        else:
            with pytest.raises(NFSError) as caught:
                client.call(calls.mkdir(client.root, b"d", SetAttr(mode=0o755)))
            assert caught.value.errno == errno.EEXIST
            assert caught.value.repeated
        assert client.reconnects == 2
        assert proxy.calls.count("mkdir") == 3


@promise("S-261")
def test_a_call_gives_up_after_its_time(nfs_host: NFSServer, export: Callable[..., str]) -> None:
    """The next call works when the server answers again."""
    path = export()
    with proxied(nfs_host) as proxy:
        location = NFSLocation(server=proxy.host, path=path, port=proxy.port, mount_port=proxy.mount_port)
        with connected(location, outage_s=1.5) as client:
            proxy.plan = lambda _: "request"
            began = time.monotonic()
            with pytest.raises((DeadlineExceeded, Unreachable)):
                client.call(calls.getattr(client.root))
            assert 1.0 < time.monotonic() - began < OUTAGE_S / 2
            proxy.plan = lambda _: ""
            client.outage_s = OUTAGE_S  # it may just pause between two attempts to connect
            assert stat.S_ISDIR(client.call(calls.getattr(client.root)).mode)


@promise("S-270")
def test_a_refusal_says_what_to_do(nfs_host: NFSServer, export: Callable[..., str]) -> None:
    path, mine, kerberos = export(clients="10.99.0.77"), export(), export(options=f"{FOR_ALL},sec=krb5")
    nfs_host.shell(f"touch {mine}/file")
    for location, kind, words in (
        (NFSLocation(server=GATEWAY, path="/x"), Unreachable, f"{GATEWAY} can't be reached: Connection refused; .*111"),
        (NFSLocation(server="nowhere.invalid", path="/x"), Unreachable, "nowhere.invalid is not found"),
        (NFSLocation(server=nfs_host.address, path="/srv/none"), AccessDenied, "mount /srv/none: there is no such"),
        (NFSLocation(server=nfs_host.address, path=f"{mine}/none"), NotFound, f"has no {mine}/none"),
        (NFSLocation(server=nfs_host.address, path=f"{mine}/file"), NotFound, f"{mine}/file .* is no directory"),
        (NFSLocation(server=nfs_host.address, path=path), AccessDenied, "or this machine is not among its clients"),
        (NFSLocation(server=nfs_host.address, path=kerberos), AccessDenied, f"gives {kerberos} only .* with Kerberos"),
    ):
        client = Client(location)
        with pytest.raises(kind, match=words) as caught:
            client.start(CONNECT_S)
        client.stop()
        assert "\n" not in str(caught.value)


@promise("S-270")
def test_a_host_of_version_4_alone_is_told_as_that(nfs_host: NFSServer, export: Callable[..., str]) -> None:
    """Although its rpcbind names a port for version 3, too."""
    client, threads = Client(NFSLocation(server=nfs_host.address, path=export())), "--grace-time 10 --lease-time 10 8"
    nfs_host.shell(f"rpc.nfsd 0; rpc.nfsd -N 3 {threads}")
    try:
        with pytest.raises(Unreachable, match="does not serve version 3 of NFS"):
            client.start(CONNECT_S)
    finally:
        client.stop()
        nfs_host.shell(f"rpc.nfsd 0; rpc.nfsd -V 3 {threads}")


@promise("S-270")
def test_without_root_the_export_has_to_be_insecure(nfs_host: NFSServer, export: Callable[..., str]) -> None:
    script = (
        "import os, sys\n"
        "from datastore.api.source import NFSLocation\n"
        "from datastore.fuse.nfs.client import Client\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "client = Client(NFSLocation(server=sys.argv[1], path=sys.argv[2]))\n"
        "try:\n    client.start(30)\n    print('mounted')\nexcept Exception as error:\n    print(error)\n"
    )

    def tried(path: str) -> str:
        command = [sys.executable, "-c", script, nfs_host.address, path]
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300, check=True).stdout

    assert "lacks the option insecure" in tried(export(options=FOR_ALL.replace("insecure", "secure")))
    assert tried(export()) == "mounted\n"


def code(client: Client, request: calls.Request[object], identity: Credentials | None = None) -> int:
    """The errno that a call ends with, or 0."""
    try:
        client.call(request, identity)
    except OSError as error:
        return error.errno or -1
    return 0
