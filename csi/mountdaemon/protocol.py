"""The plugin's requests to the mount daemon, one per connection, over Unix sockets in a directory private to root.

    {"op": "mount", "volume": "", "spec": document, "ephemeral": bool}  -> a mount (handle.py), with its descriptors
    {"op": "unmount", "volume": "", "mountpoint": "", "force": bool}    -> {"ok": true}
    {"op": "ping"}                                                      -> {"ok": true}
    {"op": "list"}                                                      -> {"ok": true, "mounts": [...]}
    {"op": "export"}                                                    -> {"count": n}, then n mounts
    anything that fails                                                 -> {"error": line, "kind": name of the class}

The plugin answers "export" as well, at its own socket, for a restarted daemon.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from datastore.api.mountspec import MountSpec, from_json
from datastore.errors import InvalidManifest, MountFailed

from .. import frames
from ..errors import DaemonOutdated, NotAnswering, error_named
from ..handle import HandleTable, MountHandle, fetch_handles, parse_handle, send_handle
from ..unixserver import Handler
from .daemon import STOP_TIMEOUT_S, MountDaemon, MountState
from .supervisor import GONE_TIMEOUT_S, START_TIMEOUT_S, MountRequest

CONNECT_TIMEOUT_S = 2.0
MOUNT_TIMEOUT_S = START_TIMEOUT_S + 15.0
"""The supervisor's time, and the time to remove a stale mount."""
UNMOUNT_TIMEOUT_S = STOP_TIMEOUT_S + GONE_TIMEOUT_S * 2 + 15.0
QUICK_TIMEOUT_S = 10.0
"""Less than the time after which the plugin counts as hanging, because its watch task waits for the answer."""
DAEMON_POD = "the datastore-mount-daemon pod"
"""The name of the daemon in error messages."""


def daemon_handler(daemon: MountDaemon) -> Handler:
    """Return the handler that answers requests in the daemon."""

    def handle(request: frames.Message, client: socket.socket) -> None:
        match request.get("op"):
            case "mount":
                mounted = daemon.mount(
                    MountRequest(
                        volume_id=str(request["volume"]),
                        spec=from_json(str(request["spec"])),
                        ephemeral=request.get("ephemeral") is True,
                    )
                )
                try:
                    send_handle(client, mounted)
                finally:
                    mounted.close()
            case "unmount":
                force = request.get("force") is True
                daemon.unmount(str(request["volume"]), str(request.get("mountpoint", "")), force=force)
                frames.send(client, {"ok": True})
            case "ping":
                frames.send(client, {"ok": True})
            case "list":
                frames.send(client, {"ok": True, "mounts": [asdict(each) for each in daemon.states()]})
            case "export":
                daemon.handles.export(client)
            case _:
                raise MountFailed("not a request of this protocol")

    return handle


def handles_handler(handles: HandleTable, daemon: DaemonClient) -> Handler:
    """Return the handler that gives the plugin's handles to a restarted daemon; it refuses while a daemon answers."""

    def handle(request: frames.Message, client: socket.socket) -> None:
        if request.get("op") != "export":
            raise MountFailed("only export is understood here")
        with suppress(NotAnswering):
            daemon.ping()
            raise MountFailed(f"{DAEMON_POD} answers, so it has all mounts")
        handles.export(client)

    return handle


@dataclass(frozen=True, slots=True)
class DaemonClient:
    """The plugin's client of the daemon. Errors of every method: NotAnswering; the errors that the daemon reports."""

    path: Path
    node: str = ""
    """The node's name, for error messages."""

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> MountHandle:
        """See MountDaemon.mount; the caller owns the descriptors of the handle. Errors: DaemonOutdated."""
        request = {"op": "mount", "volume": volume_id, "spec": spec.to_json(), "ephemeral": ephemeral}
        with self._asked(request) as stream:
            try:
                return _received(stream, MOUNT_TIMEOUT_S)
            except InvalidManifest as error:
                # This process made the specification, so a daemon that finds it invalid is of an earlier release.
                raise DaemonOutdated(str(error)) from None

    def unmount(self, volume_id: str, mountpoint: str = "", *, force: bool = False) -> None:
        """See MountDaemon.unmount."""
        request = {"op": "unmount", "volume": volume_id, "mountpoint": mountpoint, "force": force}
        with self._asked(request) as stream:
            _answer(stream, UNMOUNT_TIMEOUT_S)

    def ping(self) -> None:
        """Check that the daemon answers."""
        with self._asked({"op": "ping"}) as stream:
            _answer(stream, QUICK_TIMEOUT_S)

    def states(self) -> list[MountState]:
        """Return the state of all mounts of the daemon."""
        with self._asked({"op": "list"}) as stream:
            return [MountState(**each) for each in _answer(stream, QUICK_TIMEOUT_S)["mounts"]]

    @contextmanager
    def _asked(self, request: frames.Message) -> Iterator[socket.socket]:
        with connected(self.path, f"{DAEMON_POD} of node {self.node}" if self.node else DAEMON_POD) as stream:
            frames.send(stream, request)
            yield stream


def handles_of(path: Path, whose: str = DAEMON_POD) -> list[MountHandle]:
    """Return the handles of the process at this socket; the caller owns their descriptors. Errors: NotAnswering."""
    with connected(path, whose) as stream:
        frames.send(stream, {"op": "export"})
        return fetch_handles(stream, QUICK_TIMEOUT_S)


@contextmanager
def connected(path: Path, whose: str = DAEMON_POD) -> Iterator[socket.socket]:
    """A connection to a socket. Errors: NotAnswering, which names the pod (`whose`)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(CONNECT_TIMEOUT_S)
        try:
            stream.connect(str(path))
        except OSError as error:
            text = f"no process answers at {path} ({error.strerror or error})"
            raise NotAnswering(f"{text}; {whose} is starting, or is not there") from None
        yield stream


def _answer(stream: socket.socket, timeout_s: float) -> frames.Message:
    message, _ = frames.receive(stream, timeout_s)
    _raise_error(message)
    return message


def _received(stream: socket.socket, timeout_s: float) -> MountHandle:
    message, descriptors = frames.receive(stream, timeout_s)
    _raise_error(message)
    return parse_handle(message, descriptors)


def _raise_error(message: frames.Message) -> None:
    if "error" in message:
        raise error_named(str(message.get("kind", "")), str(message["error"]))
