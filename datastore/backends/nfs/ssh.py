"""NFS hosts over SSH: one connection to each, checked against the known host keys, over which scripts run.

A script and its request go to the host's Python on standard input: the command line is always the same, so nothing that
anybody wrote is read by a shell. Threads: any. Nothing here retries: the reconcile loop does.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from datastore.api.source import SSHCredentials
from datastore.errors import (
    CredentialsInvalid,
    DatastoreError,
    DeadlineExceeded,
    HostUntrusted,
    InvalidManifest,
    InvalidRequest,
    ServerFault,
    Throttled,
    Unreachable,
    error_named,
)

CONNECT_S = 3.0
SESSIONS = 4
"""Scripts at once on one host: one works while others start. sshd's MaxSessions is 10 unless somebody changes it."""
IDLE_S = 120.0
ALIVE_S = 15
ANSWER_BYTES = 1 << 20
COMMAND = 'exec python3 -I -S -c "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"'
NO_PYTHON = (126, 127)
_NO_STATUS = -1
_UNANSWERED = ("Authentication timeout.", "Authentication failed: transport shut down or saw EOF")
"""paramiko's words for a host that said neither yes nor no to who logs in; it has no classes for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """Where an NFS host is, and how it is known. known_hosts: lines as sshd(8) has them."""

    host: str
    port: int
    known_hosts: str
    credentials: SSHCredentials

    def __str__(self) -> str:
        return self.host if self.port == 22 else f"{self.host}:{self.port}"

    @property
    def key(self) -> str:
        """Equal for the same host by the same credentials; tells nothing of them."""
        secrets = [self.credentials.private_key, self.credentials.password]
        parts = [self.host, str(self.port), self.known_hosts, self.credentials.username]
        parts += [each.reveal() if each else "" for each in secrets]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Connection:
    """One host's. retired: nothing new is sent over it, and whoever uses it last closes it."""

    def __init__(self, address: HostAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._client: paramiko.SSHClient | None = None
        self._error: DatastoreError | None = None
        self.sessions = threading.Semaphore(SESSIONS)
        self.users = 0
        self.used = 0.0
        self.retired = False

    def session(self, until: float) -> paramiko.Channel:
        """A channel of it, connected first if need be; whoever waits for that shares what comes of it."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            if self._client is None:
                try:
                    self._client = _connected(self._address)
                except DatastoreError as error:
                    self._error = error
                    raise
            transport = self._client.get_transport()
        finally:
            self._lock.release()
        if transport is None or not transport.is_active():
            raise EOFError("the connection has ended")
        return transport.open_session(timeout=max(0.1, until - time.monotonic()))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Hosts:
    """Connections by host and credentials; those that nobody used for a while are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}

    def run(self, address: HostAddress, script: str, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """What the script answers to the request, within limit_s, which the request is told with the rest of it.

        Errors: CredentialsInvalid, HostUntrusted, Unreachable, DeadlineExceeded, Throttled, InvalidManifest for a key
        that is none; and what the script answers as {"error": class of datastore.errors, "message": text}.
        """
        until = time.monotonic() + limit_s
        with self._connection(address) as connection:
            if not connection.sessions.acquire(timeout=limit_s / 2):
                raise Throttled(f"NFS host {address}: too many requests wait for it")
            try:
                status, output, said = _run(connection, script, request, until)
            except (OSError, EOFError, paramiko.SSHException) as error:
                # It may be half dead; the next request makes another one, and others on this one may still end well.
                connection.retired = True
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(f"NFS host {address} did not answer within {limit_s:.0f} s") from error
                raise Unreachable(f"NFS host {address}: {error or type(error).__name__}") from error
            except DatastoreError:
                connection.retired = True
                raise
            finally:
                connection.sessions.release()
        return _answer(address, status, output, said)

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            connections = list(self._connections.values())
            self._connections.clear()
        for each in connections:
            each.close()

    @contextmanager
    def _connection(self, address: HostAddress) -> Iterator[_Connection]:
        now = time.monotonic()
        with self._lock:
            connection = self._connections.get(address.key)
            if connection is None or connection.retired:
                connection = self._connections[address.key] = _Connection(address)
            connection.users += 1
            idle = [key for key, each in self._connections.items() if not each.users and now - each.used > IDLE_S]
            spare = [self._connections.pop(key) for key in idle]
        for each in spare:
            each.close()
        try:
            yield connection
        finally:
            with self._lock:
                connection.users -= 1
                connection.used = time.monotonic()
                ends = connection.retired and not connection.users
                if ends and self._connections.get(address.key) is connection:
                    del self._connections[address.key]
            if ends:
                connection.close()


def _run(connection: _Connection, script: str, request: Mapping[str, Any], until: float) -> tuple[int, bytes, bytes]:
    """The exit status, standard output and standard error. Errors: those of paramiko and of the connection."""
    program = script.encode()
    with connection.session(until) as channel:
        channel.settimeout(max(0.1, until - time.monotonic()))
        channel.exec_command(COMMAND)
        document = json.dumps({**request, "limit_s": max(1.0, until - time.monotonic() - 0.5)})
        channel.sendall(b"%d\n" % len(program) + program + document.encode())
        channel.shutdown_write()
        output = bytearray()
        while part := channel.recv(65536):
            output += part
            if len(output) > ANSWER_BYTES:
                raise paramiko.SSHException("it answers more than a script of ours does")
            channel.settimeout(max(0.1, until - time.monotonic()))
        said = channel.recv_stderr(4096) if channel.recv_stderr_ready() else b""
        if not channel.status_event.wait(max(0.1, until - time.monotonic())):
            raise TimeoutError
        status = channel.recv_exit_status()
        if status == _NO_STATUS and not channel.eof_received:
            raise EOFError("the connection ended while the script ran")
        return status, bytes(output), said


def _connected(address: HostAddress) -> paramiko.SSHClient:
    """Logged in, with a host key that is known. Errors: as those of Hosts.run."""
    credentials = address.credentials
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    for name, key in known_hosts(address.known_hosts):
        client.get_host_keys().add(name, key.get_name(), key)
    identity = private_key(credentials.private_key.reveal()) if credentials.private_key else None
    try:
        client.connect(
            address.host,
            address.port,
            credentials.username,
            credentials.password.reveal() if credentials.password else None,
            identity,
            timeout=CONNECT_S,
            banner_timeout=CONNECT_S,
            auth_timeout=CONNECT_S,
            allow_agent=False,
            look_for_keys=False,
        )
        transport = client.get_transport()
        assert transport is not None, "it is connected"
        transport.set_keepalive(ALIVE_S)
        return client
    except (OSError, EOFError, paramiko.SSHException) as error:
        client.close()
        raise _refusal(address, error) from error


def _refusal(address: HostAddress, error: Exception) -> DatastoreError:
    if isinstance(error, paramiko.AuthenticationException) and str(error) not in _UNANSWERED:
        return CredentialsInvalid(f"NFS host {address} refuses {address.credentials.username}: {error}")
    if isinstance(error, paramiko.BadHostKeyException):
        shown = error.key.get_name()
        return HostUntrusted(f"NFS host {address} shows another {shown} key than knownHosts of the StorageClass has")
    if "not found in known_hosts" in str(error):
        return HostUntrusted(f"NFS host {address} has no key in knownHosts of the StorageClass")
    return Unreachable(f"NFS host {address}: {error or type(error).__name__}")


def known_hosts(text: str) -> Iterator[tuple[str, paramiko.PKey]]:
    """Names and keys of a known_hosts file; keys of a type that is not used here are left out.

    Errors: InvalidManifest for a line that is none.
    """
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        try:
            entry = HostKeyEntry.from_line(line)
        except (InvalidHostKey, ValueError, paramiko.SSHException):
            entry, line = None, ""
        if len(line.split()) < 3 or line.startswith("@"):
            raise InvalidManifest("knownHosts must be lines of a known_hosts file (ssh-keyscan prints them)")
        if entry is not None and entry.key is not None:
            yield from ((name, entry.key) for name in entry.hostnames or [])


def private_key(text: str) -> paramiko.PKey:
    """A private key of any type, as ssh-keygen writes it. Errors: InvalidManifest, without a word of it."""
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key(io.StringIO(text))
        except paramiko.PasswordRequiredException:
            raise InvalidManifest("ssh-privatekey has a passphrase; make a key without one") from None
        except (paramiko.SSHException, ValueError, IndexError):
            continue
    raise InvalidManifest("ssh-privatekey is no private key of OpenSSH (ed25519, ecdsa or rsa)") from None


def _answer(address: HostAddress, status: int, output: bytes, said: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(output) if status == 0 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        text = " ".join(said.decode(errors="replace").split())[-300:]
        if status in NO_PYTHON:
            raise InvalidRequest(f"NFS host {address}: it needs python3 (3.8 or later): {text}")
        raise ServerFault(f"NFS host {address}: the script ended with status {status}: {text or 'nothing was said'}")
    if "error" in answer:
        raise error_named(str(answer["error"]), f"NFS host {address}: {answer.get('message', '')}", DatastoreError)
    return answer
