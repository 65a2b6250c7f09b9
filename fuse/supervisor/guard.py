"""Who started the supervisor may hold its descriptors as well: then the supervisor's own death ends no mount either.

A mount lives as long as one process has its device open. On a cluster's node a supervisor is started by a host process
(datastore.csi.mountdaemon), which gets copies over this channel and gives them to a later supervisor of the same mount.
The messages are supervisor/channel.py's, over the descriptor named by --guard:

    guard -> supervisor   {"adopt": null}                    mount anew
                          {"adopt": what INIT settled}       serve the mount of the device that travels with this
                          {"opens": true}                    then: the memory of its passthrough opens
    supervisor -> guard   {"mounted": what INIT settled}     with the device, when the mount answers
                          {"opens": true}                    with the memory of passthrough opens
    guard -> supervisor   {"spec": document}                 at any time: for the servers to come
"""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass
from typing import Any

from datastore.errors import MountFailed

from .channel import Channel

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Adopted:
    """A mount that another supervisor made: its descriptors, and what the kernel and it settled."""

    device_fd: int
    opens_fd: int
    negotiated: dict[str, Any]


class Guard:
    """The supervisor's end. Threads: the supervisor's one."""

    def __init__(self, descriptor: int) -> None:
        self._channel: Channel | None = Channel(socket.socket(fileno=descriptor))

    def adopted(self) -> Adopted | None:
        """What to serve, or None to mount anew. Errors: MountFailed."""
        channel = self._open()
        message, device_fd = channel.receive(TIMEOUT_S)
        negotiated = message.get("adopt")
        if negotiated is None:
            return None
        _, opens_fd = channel.receive(TIMEOUT_S)
        if device_fd < 0 or opens_fd < 0:
            raise MountFailed("a mount to go on with came without its descriptors")
        return Adopted(device_fd, opens_fd, negotiated)

    def give(self, held: Adopted) -> None:
        """Hand copies over. Errors: MountFailed."""
        channel = self._open()
        channel.send({"mounted": held.negotiated}, held.device_fd)
        channel.send({"opens": True}, held.opens_fd)

    def news(self) -> str | None:
        """The newest specification that has come, if any; never waits. A guard that is gone is not missed."""
        newest: str | None = None
        while self._channel is not None and select.select([self._channel], [], [], 0)[0]:
            try:
                message, _ = self._channel.receive(TIMEOUT_S)
            except MountFailed:
                self._channel.close()
                self._channel = None
                break
            document = message.get("spec")
            newest = document if isinstance(document, str) else newest
        return newest

    def _open(self) -> Channel:
        if self._channel is None:
            raise MountFailed("the guard is gone")
        return self._channel
