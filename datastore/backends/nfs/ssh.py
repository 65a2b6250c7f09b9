"""Runs scripts on NFS hosts over SSH: one connection to each host, whose key must be among the known ones.

A script and its request go to the host's Python on standard input. The command line is always the same, so no shell
reads what a user wrote. Any thread may call. Nothing here retries: the reconcile loop does.
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
from paramiko.ssh_exception import NoValidConnectionsError

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
"""How many scripts run at once on one host: one works while others start. sshd's MaxSessions is 10 by default."""
IDLE_S = 120.0
ALIVE_S = 15
ANSWER_BYTES = 1 << 20
COMMAND = 'exec python3 -I -S -c "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"'
NO_PYTHON = (126, 127)
_NO_STATUS = -1
_UNANSWERED = ("Authentication timeout.", "Authentication failed: transport shut down or saw EOF")
"""paramiko's texts when the host neither accepts nor refuses a login; paramiko has no exception classes for these."""
_SILENT = ("No existing session", "Error reading SSH protocol banner")
"""Its texts when the host takes a connection and says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """Where an NFS host is, and how to log in. known_hosts: the host's keys, as lines in the format of sshd(8)."""

    host: str
    port: int
    known_hosts: str
    credentials: SSHCredentials

    def __str__(self) -> str:
        return self.host if self.port == 22 else f"{self.host}:{self.port}"

    @property
    def key(self) -> str:
        """A hash: equal for the same host, host keys and credentials, and reveals nothing of them."""
        secrets = [self.credentials.private_key, self.credentials.password]
        parts = [self.host, str(self.port), self.known_hosts, self.credentials.username]
        parts += [each.reveal() if each else "" for each in secrets]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Connection:
    """The connection to one host. retired: no new script uses the connection, and its last user closes it."""

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
        """Open a channel; connect first if need be. Threads that wait for the connection share its outcome."""
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
    """Connections by host and credentials. Each run() closes those that have not been used for IDLE_S."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}

    def run(self, address: HostAddress, script: str, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return what the script answers to the request within limit_s; the script is told how much of it is left.

        Errors: CredentialsInvalid, HostUntrusted, Unreachable, DeadlineExceeded, Throttled; InvalidManifest for a key
        that can't be parsed; InvalidRequest without Python; ServerFault when the script fails; and what the script
        answers as {"error": class of datastore.errors, "message": text}.
        """
        until = time.monotonic() + limit_s
        with self._connection(address) as connection:
            if not connection.sessions.acquire(timeout=limit_s / 2):
                raise Throttled(f"NFS host {address}: too many requests wait for it")
            try:
                status, output, said = _run(connection, script, request, until)
            except (OSError, EOFError, paramiko.SSHException) as error:
                # The connection may be half dead: the next run() makes a new one; scripts on this one may continue.
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
    """Return exit status, standard output and standard error. Errors: those of paramiko and of the connection."""
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
    """Log in to a host, whose key must be known. Errors: see Hosts.run."""
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
    if str(error).startswith(_SILENT):
        return Unreachable(f"NFS host {address}: no answer as an SSH server within {CONNECT_S:.0f} s")
    if isinstance(error, NoValidConnectionsError):
        error = next(iter(error.errors.values()))
    return Unreachable(f"NFS host {address}: {getattr(error, 'strerror', '') or error or type(error).__name__}")


def known_hosts(text: str) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield names and keys of known_hosts lines; skip types that paramiko does not know. Errors: InvalidManifest."""
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
    """Parse a private key as ssh-keygen writes it. Errors: InvalidManifest, whose text shows nothing of the key."""
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
