"""The options for the kernel's NFS client, the requests to servers, and what is known of the mounts."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from datastore import mountinfo, nfsclient
from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation, S3Location
from datastore.csi.commands import Commands
from datastore.csi.kernelmounter import KernelMounter, transferred
from datastore.csi.settings import Settings
from datastore.errors import AccessDenied, Unreachable
from datastore.nfsclient import device_of, is_of_this_machine, options, ping, versions_of
from datastore.nfsmount import mount
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.servers import reserved_port

EXPORT = NFSLocation(server="nfs.example.org", path="/srv/a")


@promise("S-232")
def test_the_options_of_a_mount() -> None:
    plain = options(EXPORT, "4.2", "10.0.0.1", metadata_ttl_s=1.5)
    assert plain == "vers=4.2,addr=10.0.0.1,proto=tcp,hard,actimeo=1"
    chosen = NFSLocation(server="h", path="/a", port=2050, mount_port=99, options=("softerr", "timeo=150"))
    assert options(chosen, "4.1", "fd00::1", metadata_ttl_s=60.0).split(",")[-3:] == [
        "port=2050",
        "softerr",
        "timeo=150",
    ]
    old = options(chosen, "3", "10.0.0.1", metadata_ttl_s=0.0).split(",")
    assert {"nolock", "mountaddr=10.0.0.1", "mountport=99", "actimeo=0"} <= set(old)


@promise("S-232")
@pytest.mark.parametrize(
    ("location", "tried"),
    [
        (EXPORT, ("4.2", "4.1", "4.0", "3")),
        (NFSLocation(server="h", path="/", version="4"), ("4.2", "4.1", "4.0")),
        (NFSLocation(server="h", path="/", version="3"), ("3",)),
        (NFSLocation(server="h", path="/", options=("hard", "nfsvers=4.1")), ("4.1",)),
    ],
)
def test_the_newest_version_is_tried_first_unless_one_is_chosen(location: NFSLocation, tried: tuple[str, ...]) -> None:
    assert versions_of(location) == tried


def test_the_mount_table_names_server_and_path() -> None:
    assert device_of(EXPORT) == "nfs.example.org:/srv/a"
    assert device_of(NFSLocation(server="fd00::1", path="/a")) == "[fd00::1]:/a"


@promise("S-233")
@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("169.254.169.254", True),
        ("fe80::1%eth0", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("fd00::1", False),
    ],
)
def test_no_datastore_leads_to_the_node_itself(address: str, own: bool) -> None:
    assert is_of_this_machine(address) == own


@promise("S-233")
@pytest.mark.parametrize("server", ["127.0.0.1", "localhost", "::1"])
def test_an_export_of_the_node_itself_is_refused(server: str) -> None:
    with pytest.raises(AccessDenied, match="an address of the node itself"):
        mount(NFSLocation(server=server, path="/"), "/nowhere", read_only=True, metadata_ttl_s=1.0)


def test_a_server_that_is_not_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "not known")))
    with pytest.raises(Unreachable, match=r"the NFS server nfs\.invalid is not found"):
        mount(NFSLocation(server="nfs.invalid", path="/"), "/nowhere", read_only=True, metadata_ttl_s=1.0)


@contextmanager
def server(answer: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """Yield a server's port. answer: returns the reply to a call's bytes; None: there is no reply."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent: list[socket.socket] = []

        def serve() -> None:
            client, _ = listening.accept()
            said = answer(client.recv(100))
            if said is None:
                silent.append(client)
            else:
                client.sendall(said)
                client.close()

        serving = threading.Thread(target=serve)
        serving.start()
        yield listening.getsockname()[1]
        serving.join()
        for client in silent:
            client.close()


def accepted(call: bytes) -> bytes:
    """RFC 5531: the same xid, REPLY, MSG_ACCEPTED, no verifier, SUCCESS."""
    _, xid, kind, rpc, program, version, procedure = struct.unpack(">7I", call[:28])
    assert (kind, rpc, program, version, procedure) == (0, 2, 100003, 4, 0)
    return struct.pack(">7I", 1 << 31 | 24, xid, 1, 0, 0, 0, 0)


def test_a_server_that_answers_is_there() -> None:
    with server(accepted) as port:
        assert ping("127.0.0.1", port, "4.2", timeout_s=PATIENCE_S) == ""


@promise("S-234")
def test_a_silent_server_is_reported_within_the_deadline() -> None:
    began = time.monotonic()
    with server(lambda _: None) as port:
        assert "does not answer on port" in ping("127.0.0.1", port, "4.2", timeout_s=0.2)
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize(("answer", "said"), [(b"", "hangs up"), (b"HTTP/1.1 400 Bad Request", "is no NFS server")])
def test_a_server_of_another_protocol_is_recognised(answer: bytes, said: str) -> None:
    with server(lambda _: answer) as port:
        assert said in ping("127.0.0.1", port, "4", timeout_s=PATIENCE_S)


def test_a_closed_port_is_reported() -> None:
    with reserved_port() as port:
        said = ping("127.0.0.1", port, "4")
    assert said == f"the NFS server 127.0.0.1 does not answer on port {port} (Connection refused)"


def spec(tmp_path: Path, source: Any = EXPORT) -> MountSpec:
    return MountSpec(
        name="a", mountpoint=str(tmp_path / "m"), source=source, state_dir=str(tmp_path / "s"), cache_dir="/c"
    )


@promise("S-232")
def test_the_kernel_mounts_nfs_where_it_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First this machine's kernel is asked, then a simulated one."""
    kernel = KernelMounter(Settings(node_id="n", plugin_dir=tmp_path), Commands())
    assert kernel.why_not(S3Location(bucket="b")) == "the kernel does not mount sources of kind s3"
    if "nfs" not in Path("/proc/filesystems").read_text().split():
        assert kernel.why_not(EXPORT) == "this node's kernel has no NFS client"
    monkeypatch.setattr(nfsclient, "FILESYSTEMS", tmp_path / "filesystems")
    (tmp_path / "filesystems").write_text("nodev\tproc\nnodev\tnfs\nnodev\tnfs4\n")
    assert kernel.why_not(EXPORT) == ""


@promise("S-235")
def test_a_new_plugin_knows_the_mounts_of_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes over mounts that still exist, and skips files that it can't read."""
    settings = Settings(node_id="n", plugin_dir=tmp_path)
    before = KernelMounter(settings, Commands())
    there = f"30 22 0:50 / {tmp_path}/m rw - nfs4 nfs.example.org:/srv/a rw,vers=4.2,addr=10.0.0.1"
    monkeypatch.setattr(mountinfo, "MOUNTINFO", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(there)
    monkeypatch.setattr(before, "_is_stale", lambda _spec: False)
    before.mount("team/data/1", spec(tmp_path), ephemeral=False)
    (tmp_path / "kernel" / "broken.json").write_text("{")
    (tmp_path / "kernel" / "gone.json").write_text(
        json.dumps({"volume": "gone", "spec": MountSpec.to_json(spec(tmp_path / "elsewhere")), "ephemeral": False})
    )
    after = KernelMounter(settings, Commands())
    after.adopt()
    assert after.volumes() == ["team/data/1"]
    found = after.get("team/data/1")
    assert found is not None
    assert found.spec == spec(tmp_path)
    assert not (tmp_path / "kernel" / "gone.json").exists()


STATS = """device proc mounted on /proc with fstype proc
device nfs.example.org:/srv/a mounted on /k/globalmount with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tage:\t12
\tbytes:\t1 2 3 4 5000 6000 7 8
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
device other mounted on /x with fstype ext4
\tbytes:\t1 2 3 4 5 6 7 8
"""


def test_the_bytes_of_a_mount_are_those_that_the_kernel_counts() -> None:
    assert transferred(STATS) == {"/k/globalmount": (5000, 6000)}
