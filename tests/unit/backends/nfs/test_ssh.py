"""datastore.backends.nfs.ssh: keys of hosts and users, hosts that go away. More: tests/nfs/test_hostexport.py."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, OPEN_SUCCEEDED

from datastore.api.source import SSHCredentials
from datastore.backends.nfs import ssh
from datastore.backends.nfs.ssh import HostAddress, Hosts, known_hosts, private_key
from datastore.errors import CredentialsInvalid, InvalidManifest, Unreachable
from datastore.secret import Secret
from tests.promises import promise

LIMIT_S = 120.0


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_keys_of_every_common_type(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True, timeout=60)
    key = private_key(path.read_text())
    public = path.with_suffix(".pub").read_text()
    scanned = f"# nas:22 SSH-2.0-OpenSSH\nnas,10.0.0.1 {public}\n\nnas ssh-unheard-of AAAA\n"
    assert [(name, each.get_base64()) for name, each in known_hosts(scanned)] == [
        ("nas", key.get_base64()),
        ("10.0.0.1", key.get_base64()),
    ]


def test_an_invalid_key_is_reported_without_its_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest) as caught:
        private_key("-----BEGIN OPENSSH PRIVATE KEY-----\nc2VjcmV0\n-----END OPENSSH PRIVATE KEY-----\n")
    assert "c2VjcmV0" not in str(caught.value)
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", path], check=True, timeout=60)
    with pytest.raises(InvalidManifest, match="passphrase"):
        private_key(path.read_text())


class Host(paramiko.ServerInterface):
    """A host that logs in who says 'right', and leaves who says 'nothing' without an answer.

    dies: its first connection ends when it has the whole script; otherwise a script is answered by {}.
    """

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies
        self.ended = threading.Event()
        self._key = paramiko.ECDSAKey.generate()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def address(self, password: str) -> HostAddress:
        host, port = self._listener.getsockname()
        known = f"[{host}]:{port} {self._key.get_name()} {self._key.get_base64()}\n"
        credentials = SSHCredentials(username="root", password=Secret(password))
        return HostAddress(host=host, port=port, known_hosts=known, credentials=credentials)

    def close(self) -> None:
        self.ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._threads:
            each.join(LIMIT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        transport.add_server_key(self._key)
        transport.start_server(threading.Event(), self)
        channel = transport.accept(LIMIT_S)
        if channel is not None:
            while channel.recv(65536):
                pass
            if self.dies:
                self.dies = False
            else:
                channel.sendall(b"{}")
                channel.send_exit_status(0)
                channel.close()
                self.ended.wait(LIMIT_S)
        transport.close()

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_auth_password(self, username: str, password: str) -> int:
        if password == "nothing":
            self.ended.wait(LIMIT_S)
        return AUTH_SUCCESSFUL if password == "right" else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return True


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


@promise("S-288")
def test_a_host_that_is_silent_during_login_counts_as_unreachable(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    try:
        with pytest.raises(CredentialsInvalid):
            hosts.run(host.address("wrong"), "", {}, LIMIT_S)
        monkeypatch.setattr(ssh, "CONNECT_S", 2.0)
        with pytest.raises(Unreachable):
            hosts.run(host.address("nothing"), "", {}, LIMIT_S)
    finally:
        host.close()


@promise("S-288")
def test_the_error_says_why_a_host_is_unreachable(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        credentials = SSHCredentials(username="root", password=Secret("right"))
        address = HostAddress(host=host, port=port, known_hosts="", credentials=credentials)
        with pytest.raises(Unreachable, match="no answer as an SSH server within 1 s"):
            hosts.run(address, "", {}, LIMIT_S)
    with pytest.raises(Unreachable, match=f"{port}: Connection refused$"):
        hosts.run(address, "", {}, LIMIT_S)


@promise("S-288")
def test_a_connection_that_breaks_during_a_script_is_made_anew(hosts: Hosts) -> None:
    """The host went away; the script did not fail."""
    host = Host(dies=True)
    try:
        with pytest.raises(Unreachable):
            hosts.run(host.address("right"), "", {}, LIMIT_S)
        assert hosts.run(host.address("right"), "", {}, LIMIT_S) == {}
    finally:
        host.close()
