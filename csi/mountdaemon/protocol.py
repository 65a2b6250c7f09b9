"""What the plugin asks of the mount daemon, one request per connection, over sockets in a directory for root only.

    {"op": "mount", "volume": "", "spec": document, "ephemeral": bool}  -> a mount (handle.py), with its descriptors
    {"op": "unmount", "volume": "", "mountpoint": "", "force": bool}    -> {"ok": true}
    {"op": "ping"}                                                      -> {"ok": true}
    {"op": "list"}                                                      -> {"ok": true, "mounts": [...]}
    {"op": "export"}                                                    -> {"count": n}, then n mounts
    anything that fails                                                 -> {"error": line, "kind": name of the class}

"export" is answered by the plugin as well, at its own socket, for a daemon that starts anew.
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
"""The supervisor's time, and what a stale mount takes to clear away."""
UNMOUNT_TIMEOUT_S = STOP_TIMEOUT_S + GONE_TIMEOUT_S * 2 + 15.0
QUICK_TIMEOUT_S = 10.0
"""Less than it takes until the plugin counts as hanging: it asks in the same loop."""
DAEMON_POD = "the datastore-mount-daemon pod"
"""Who answers, in words for people."""


def daemon_handler(daemon: MountDaemon) -> Handler:
    """The daemon's side."""

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
    """The plugin's side, for a daemon that starts anew; while one answers, nobody has to ask."""

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
    """The daemon as the plugin sees it. Every method: NotAnswering when it does not answer, and what it reports."""

    path: Path
    node: str = ""
    """For messages."""

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> MountHandle:
        """Mounted as asked, anew or already; the caller's own descriptors. Errors: DaemonOutdated."""
        request = {"op": "mount", "volume": volume_id, "spec": spec.to_json(), "ephemeral": ephemeral}
        with self._asked(request) as stream:
            try:
                return _received(stream, MOUNT_TIMEOUT_S)
            except InvalidManifest as error:
                # What we made ourselves is a mount specification, at least by our code.
                raise DaemonOutdated(str(error)) from None

    def unmount(self, volume_id: str, mountpoint: str = "", *, force: bool = False) -> None:
        """See MountDaemon.unmount."""
        request = {"op": "unmount", "volume": volume_id, "mountpoint": mountpoint, "force": force}
        with self._asked(request) as stream:
            _answer(stream, UNMOUNT_TIMEOUT_S)

    def ping(self) -> None:
        """Whether it answers."""
        with self._asked({"op": "ping"}) as stream:
            _answer(stream, QUICK_TIMEOUT_S)

    def states(self) -> list[MountState]:
        """All mounts of the daemon."""
        with self._asked({"op": "list"}) as stream:
            return [MountState(**each) for each in _answer(stream, QUICK_TIMEOUT_S)["mounts"]]

    @contextmanager
    def _asked(self, request: frames.Message) -> Iterator[socket.socket]:
        with connected(self.path, f"{DAEMON_POD} of node {self.node}" if self.node else DAEMON_POD) as stream:
            frames.send(stream, request)
            yield stream


def handles_of(path: Path, whose: str = DAEMON_POD) -> list[MountHandle]:
    """All handles that the process at this socket has; the caller's own descriptors. Errors: NotAnswering."""
    with connected(path, whose) as stream:
        frames.send(stream, {"op": "export"})
        return fetch_handles(stream, QUICK_TIMEOUT_S)


@contextmanager
def connected(path: Path, whose: str = DAEMON_POD) -> Iterator[socket.socket]:
    """Errors: NotAnswering, which names the pod."""
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
