"""What the plugin asks of the keeper's host, one request per connection, over sockets in a directory for root only.

    {"op": "mount", "volume": "", "spec": document, "ephemeral": bool}  -> a mount (held.py), with its descriptors
    {"op": "unmount", "volume": "", "mountpoint": "", "force": bool}    -> {"ok": true}
    {"op": "ping"}                                                      -> {"ok": true}
    {"op": "list"}                                                      -> {"ok": true, "mounts": [...]}
    {"op": "export"}                                                    -> {"count": n}, then n mounts
    anything that fails                                                 -> {"error": line, "kind": name of the class}

"export" is answered by the plugin as well, at its own socket, for a host that starts anew.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from datastore.api.mountspec import MountSpec, from_json
from datastore.errors import InvalidManifest, MountFailed

from .. import frames
from .. import held as holding
from ..errors import KeeperAway, KeeperOld, error_named
from ..held import Held, Holdings
from ..unixserver import Handler
from .host import STOP_TIMEOUT_S, Host, KeptState
from .kept import GONE_TIMEOUT_S, START_TIMEOUT_S, Setting

CONNECT_TIMEOUT_S = 2.0
MOUNT_TIMEOUT_S = START_TIMEOUT_S + 15.0
"""The keeper's time, and what a stale mount takes to clear away."""
UNMOUNT_TIMEOUT_S = STOP_TIMEOUT_S + GONE_TIMEOUT_S * 2 + 15.0
QUICK_TIMEOUT_S = 10.0
KEEPER_POD = "the datastore-keeper pod"
"""Who answers, in words for people; holders are the datastore-node pods."""


def host_handler(host: Host) -> Handler:
    """The host's side."""

    def handle(request: frames.Message, client: socket.socket) -> None:
        match request.get("op"):
            case "mount":
                setting = Setting(
                    volume_id=str(request["volume"]),
                    spec=from_json(str(request["spec"])),
                    ephemeral=request.get("ephemeral") is True,
                )
                held = host.mount(setting)
                try:
                    holding.send(client, held)
                finally:
                    held.close()
            case "unmount":
                force = request.get("force") is True
                host.unmount(str(request["volume"]), str(request.get("mountpoint", "")), force=force)
                frames.send(client, {"ok": True})
            case "ping":
                frames.send(client, {"ok": True})
            case "list":
                frames.send(client, {"ok": True, "mounts": [asdict(each) for each in host.states()]})
            case "export":
                host.holdings.export(client)
            case _:
                raise MountFailed("not a request of this protocol")

    return handle


def holder_handler(holdings: Holdings) -> Handler:
    """The plugin's side, for a host that starts anew."""

    def handle(request: frames.Message, client: socket.socket) -> None:
        if request.get("op") != "export":
            raise MountFailed("only export is understood here")
        holdings.export(client)

    return handle


@dataclass(frozen=True, slots=True)
class Keeper:
    """The host as the plugin sees it. Every method: KeeperAway when it does not answer, and what it reports."""

    path: Path
    node: str = ""
    """For messages."""

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> Held:
        """Mounted as asked, anew or already; the caller's own descriptors. Errors: KeeperOld, what it does not know."""
        request = {"op": "mount", "volume": volume_id, "spec": spec.to_json(), "ephemeral": ephemeral}
        with self._asked(request) as stream:
            try:
                return _received(stream, MOUNT_TIMEOUT_S)
            except InvalidManifest as error:
                # What we made ourselves is a mount specification, at least by our code.
                raise KeeperOld(str(error)) from None

    def unmount(self, volume_id: str, mountpoint: str = "", *, force: bool = False) -> None:
        """See Host.unmount."""
        request = {"op": "unmount", "volume": volume_id, "mountpoint": mountpoint, "force": force}
        with self._asked(request) as stream:
            _answer(stream, UNMOUNT_TIMEOUT_S)

    def ping(self) -> None:
        """Whether it answers."""
        with self._asked({"op": "ping"}) as stream:
            _answer(stream, CONNECT_TIMEOUT_S)

    def states(self) -> list[KeptState]:
        """All mounts of the host."""
        with self._asked({"op": "list"}) as stream:
            return [KeptState(**each) for each in _answer(stream, QUICK_TIMEOUT_S)["mounts"]]

    @contextmanager
    def _asked(self, request: frames.Message) -> Iterator[socket.socket]:
        with connected(self.path, f"{KEEPER_POD} of node {self.node}" if self.node else KEEPER_POD) as stream:
            frames.send(stream, request)
            yield stream


def export_of(path: Path, whose: str = KEEPER_POD) -> list[Held]:
    """All mounts that the process at this socket holds; the caller's own descriptors. Errors: KeeperAway."""
    with connected(path, whose) as stream:
        frames.send(stream, {"op": "export"})
        return holding.fetch(stream, QUICK_TIMEOUT_S)


@contextmanager
def connected(path: Path, whose: str = KEEPER_POD) -> Iterator[socket.socket]:
    """Errors: KeeperAway, which names the pod."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(CONNECT_TIMEOUT_S)
        try:
            stream.connect(str(path))
        except OSError as error:
            text = f"no process answers at {path} ({error.strerror or error})"
            raise KeeperAway(f"{text}; {whose} is starting, or is not there") from None
        yield stream


def _answer(stream: socket.socket, timeout_s: float) -> frames.Message:
    message, _ = frames.receive(stream, timeout_s)
    _raise_error(message)
    return message


def _received(stream: socket.socket, timeout_s: float) -> Held:
    message, descriptors = frames.receive(stream, timeout_s)
    _raise_error(message)
    return holding.parsed(message, descriptors)


def _raise_error(message: frames.Message) -> None:
    if "error" in message:
        raise error_named(str(message.get("kind", "")), str(message["error"]))
