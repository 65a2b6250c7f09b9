"""An SFTP session for many threads at once, which is replaced when it breaks.

One thread runs the event loop of asyncssh. A call is a coroutine on the current session; if the connection breaks, the
call is made again on the next session and is told so, because the server may have carried it out already. Nothing
retries below that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncssh

from datastore.api.source import SFTPLocation
from datastore.errors import (
    AccessDenied,
    CredentialsInvalid,
    DeadlineExceeded,
    InvalidManifest,
    StoreError,
    Unreachable,
    Unsupported,
)
from datastore.logs import fields

from ..ops import FSError
from ..store.metrics import StoreMetrics

log = logging.getLogger(__name__)
asyncssh.set_log_level(logging.WARNING)  # otherwise asyncssh logs each step of each login

T = TypeVar("T")
CONNECT_S = 10.0
"""The timeout, in seconds, of the TCP connection, and again of the login."""
OUTAGE_S = 600.0
"""How long a call waits for a server that does not answer."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
ALIVE_S, ALIVE_COUNT = 5, 3
"""The keep-alive: a connection is given up after three unanswered requests in a row, five seconds apart."""
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""The ciphers to prefer: they take half the CPU time of ChaCha20, which asyncssh prefers."""
BROKEN = (
    asyncssh.SFTPNoConnection,
    asyncssh.SFTPConnectionLost,
    asyncssh.DisconnectError,
    asyncssh.ChannelOpenError,
    ConnectionError,
)
"""The errors of a lost connection: the server may or may not have carried out the call."""
OWN_FAULTS = (asyncssh.ConfigParseError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError)
"""The errors of the user's own files, before a connection is begun."""
ERRNO = {
    asyncssh.FX_NO_SUCH_FILE: errno.ENOENT,
    asyncssh.FX_PERMISSION_DENIED: errno.EACCES,
    asyncssh.FX_OP_UNSUPPORTED: errno.EOPNOTSUPP,
    asyncssh.FX_BAD_MESSAGE: errno.EINVAL,
}
"""The errno of each code of SFTP version 3 that says what is wrong; other codes say only that the call failed."""

Call = Callable[[asyncssh.SFTPClient, bool], Awaitable[T]]
"""A coroutine function of (session, whether the server may have carried out the call already on an earlier one)."""


class SFTPFailed(FSError):
    """The server refused a call. vague: it did not say why (for example, SSH_FX_FAILURE), and the errno is EIO."""

    def __init__(self, error: asyncssh.SFTPError) -> None:
        super().__init__(ERRNO.get(error.code, errno.EIO), error.reason)
        self.vague = error.code not in ERRNO


class _Watch(asyncssh.SSHClient):
    """An SSH client that remembers the host key which known_hosts did not have."""

    def __init__(self) -> None:
        self.refused = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Refuse a key; asyncssh calls this only for a host key that known_hosts does not have."""
        self.refused = f"{key.get_algorithm()} {key.get_fingerprint()}"
        return False


class Connection:
    """The connection to one server with one login."""

    def __init__(self, location: SFTPLocation) -> None:
        """Errors: InvalidManifest if the private key can't be used."""
        self.location = location
        self.outage_s = OUTAGE_S
        self.metrics = StoreMetrics()
        self.reconnects = -1
        self._options = _login(location)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sftp", daemon=True)
        self._ssh: asyncssh.SSHClientConnection | None = None
        self._sftp: asyncssh.SFTPClient | None = None
        self._connecting: asyncio.Task[asyncssh.SFTPClient] | None = None
        self._failure: StoreError | None = None
        self._stopping = False
        self._beginning = threading.Lock()
        """A call begins before stop(), which cancels it, or not at all, so that no thread waits for a stopped loop."""

    @property
    def _server(self) -> str:
        """The server in messages. Port 22 is left out: the user's SSH configuration may put another in its place."""
        port = "" if self.location.port == 22 else f", port {self.location.port},"
        return f"the SSH server {self.location.host}{port}"

    @property
    def _where(self) -> str:
        """The server as an argument of ssh and ssh-keyscan."""
        return f"{'' if self.location.port == 22 else f'-p {self.location.port} '}{self.location.host}"

    # -- for callers on any thread

    def start(self, *, wait: bool) -> None:
        """Start the thread. wait: connect now, not at the first call. Errors: StoreError if that fails."""
        self._thread.start()
        if wait:
            asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(3 * CONNECT_S)

    def stop(self) -> None:
        """End the connection; calls that are under way fail. Idempotent."""
        with self._beginning:
            if self._stopping:
                return
            self._stopping = True
        if self._thread.is_alive():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CONNECT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CONNECT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def call(self, what: str, call: Call[T], *, sent: int = 0) -> T:
        """Run `call` on a session and return its result. what, sent: the call's name and size for the metrics.

        Errors: SFTPFailed; those of `call`; StoreError after outage_s without an answer; ENOTCONN when the mount ends.
        """
        began = time.monotonic()
        failed, lost, received = "", "", 0
        self.metrics.silence.asked()
        try:
            with self._beginning:
                if self._stopping:
                    raise FSError(errno.ENOTCONN)
                made = self._again(what, call, began + self.outage_s)
                waiting = asyncio.run_coroutine_threadsafe(made, self._loop)
            result = waiting.result()
            received = len(result) if isinstance(result, bytes) else 0
            return result
        except BaseException as error:
            failed, lost = type(error).__name__, str(error) if isinstance(error, StoreError) else ""
            if isinstance(error, concurrent.futures.CancelledError):
                raise FSError(errno.ENOTCONN) from None
            raise
        finally:
            self.metrics.silence.ended(lost)
            self.metrics.record(what, time.monotonic() - began, sent=sent, received=received, error=failed)

    def username(self) -> str:
        """Return the user name of the login; '' before the first connection."""
        return str(self._ssh.get_extra_info("username", "")) if self._ssh is not None else ""

    # -- in the event loop

    async def _again(self, what: str, call: Call[T], until: float) -> T:
        repeated = False
        while True:
            try:
                async with asyncio.timeout_at(until):
                    sftp = await self._session()
                    return await call(sftp, repeated)
            except TimeoutError:
                raise self._failure or DeadlineExceeded(
                    f"{self._server} did not answer for {self.outage_s:.0f} s"
                ) from None
            except BROKEN as error:
                self._lost(sftp, error)
                repeated = True
                self.metrics.record_retry(what, self._failure or Unreachable(str(error)))
            except asyncssh.SFTPError as error:
                raise SFTPFailed(error) from error

    async def _session(self) -> asyncssh.SFTPClient:
        if self._sftp is not None:
            return self._sftp
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect_again())
        return await asyncio.shield(self._connecting)

    async def _connect_again(self) -> asyncssh.SFTPClient:
        """Connect, with retries for outage_s. Waiting calls have deadlines of their own; a later call starts again."""
        pause_s, until = FIRST_PAUSE_S, time.monotonic() + self.outage_s
        try:
            while True:
                try:
                    return await self._connect()
                except StoreError as error:
                    if str(error) != str(self._failure):
                        log.error(str(error))
                    self._failure = error
                    self.metrics.silence.failed(error)
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._connecting = None

    async def _connect(self) -> asyncssh.SFTPClient:
        """Open a new session. Errors: StoreError that says why that failed, and what to do."""
        watch = _Watch()
        server = self._server
        ssh = None
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                ssh = await asyncssh.connect(self.location.host, client_factory=lambda: watch, **self._options)
                sftp = await ssh.start_sftp_client()
        except asyncssh.HostKeyNotVerifiable as error:
            raise AccessDenied(self._unknown_key(watch.refused or str(error))) from error
        except asyncssh.PermissionDenied as error:
            agent = "" if self.location.credentials else "; a key with a passphrase has to be in your ssh-agent"
            raise CredentialsInvalid(
                f"{server} refuses the login with these keys or this password: {error.reason} (`ssh -v {self._where}`"
                f" shows what it asks for; spec.sftp.credentialsSecret names others{agent})"
            ) from error
        except (asyncssh.ChannelOpenError, asyncssh.SFTPError) as error:
            if ssh is not None:
                ssh.abort()
            raise Unsupported(f"{server} offers no SFTP: {error.reason or error} ({self._missing(error)})") from error
        except (OSError, asyncssh.Error, ValueError) as error:
            if ssh is not None:
                ssh.abort()
            if isinstance(error, OWN_FAULTS) or (isinstance(error, OSError) and error.filename):
                raise CredentialsInvalid(
                    f"{server} is not asked, because your own SSH configuration, or a file that it names, can't be"
                    f" used: {_words(error)} (`ssh -v {self._where}` shows what is read)"
                ) from error
            why = "no answer in time" if isinstance(error, TimeoutError) else _words(error)
            raise Unreachable(
                f"{server} can't be reached: {why} (check spec.sftp.host and port, and that sshd runs there)"
            ) from error
        self._ssh, self._sftp, self._failure = ssh, sftp, None
        self.reconnects += 1
        if self.reconnects:
            log.warning("connected again", extra=fields(server=self.location.host))
        return sftp

    def _missing(self, error: asyncssh.ChannelOpenError | asyncssh.SFTPError) -> str:
        """Return what has to be right on a server that accepts the login and then begins no SFTP."""
        if isinstance(error, asyncssh.SFTPError):
            return f"the login's shell, or a ForceCommand, ends or prints something: see `ssh {self._where} true`"
        if error.code == asyncssh.OPEN_CONNECT_FAILED:
            return "the server's log says why: ChrootDirectory or MaxSessions in sshd_config, for example"
        return "sshd_config needs a Subsystem sftp"

    def _unknown_key(self, key: str) -> str:
        host = self.location.host if self.location.port == 22 else f"'[{self.location.host}]:{self.location.port}'"
        where = "your known_hosts file"
        do = f"`ssh {self._where}` puts it there, after `ssh-keygen -R {host}` if an older key of it stands there"
        if self.location.known_hosts:
            where, do = "spec.sftp.knownHosts", f"put what `ssh-keyscan {self._where}` prints there"
        return (
            f"{self._server} has a host key that {where} does not have: {key}. Ask its administrator whether this is"
            f" its key; if it is, {do}"
        )

    def _lost(self, sftp: asyncssh.SFTPClient, error: BaseException) -> None:
        if self._sftp is not sftp:
            return
        self._sftp = None
        self._failure = Unreachable(f"the connection to {self._server} is lost: {error}")
        self.metrics.silence.failed(self._failure)
        log.warning("the connection is lost", extra=fields(server=self.location.host, why=str(error)))
        if self._ssh is not None:
            self._ssh.abort()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if self._ssh is not None:
            self._ssh.abort()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _words(error: Exception) -> str:
    """Return the reason in the system's words, where the error has an errno."""
    if isinstance(error, OSError) and error.errno:
        reason = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)  # a negative one: getaddrinfo(3)
        return f"{reason}: {error.filename}" if error.filename else reason
    return str(error) or type(error).__name__


def _login(location: SFTPLocation) -> dict[str, Any]:
    """Return options for asyncssh.connect; the others come from the user's own SSH configuration, agent and keys."""
    given: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "login_timeout": CONNECT_S,
        "keepalive_interval": ALIVE_S,
        "keepalive_count_max": ALIVE_COUNT,
        "encryption_algs": CIPHERS,
    }
    if location.port != 22:
        given["port"] = location.port
    if location.known_hosts:
        given["known_hosts"] = location.known_hosts.encode()
    credentials = location.credentials
    if credentials is None:
        return given
    given |= {"agent_path": None, "client_keys": None}
    if credentials.username:
        given["username"] = credentials.username
    if credentials.password is not None:
        given["password"] = credentials.password.reveal()
    if credentials.private_key is not None:
        try:
            given["client_keys"] = [asyncssh.import_private_key(credentials.private_key.reveal())]
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise InvalidManifest(
                f"the Secret's ssh-privatekey is no private key that can be used: {error} (one without a passphrase,"
                " as ssh-keygen -N '' makes it)"
            ) from None
    return given
