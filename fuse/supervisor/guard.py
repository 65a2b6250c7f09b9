"""The channel to the guard: a process that holds the mount's descriptors, so that the mount survives the supervisor.

A mount lives as long as one process has its device open. On a cluster's node a host process
(datastore.csi.mountdaemon) starts the supervisor and is its guard: it gets copies of the descriptors over this channel
and gives them to a later supervisor of the same mount. The messages are those of datastore/frames.py, over the
descriptor named by --guard. Two descriptors travel with some: the device, and the memory of its passthrough opens.

    guard -> supervisor   {"spec": document, "adopt": null}                  make a new mount
                          {"spec": document, "adopt": what INIT settled}     serve the mount of these two descriptors
    supervisor -> guard   {"mounted": what INIT settled}                     with both descriptors if the mount is new
                          {"error": line, "kind": name of the error's class} no new mount was made
    guard -> supervisor   {"spec": document}                                 at any time: for servers started later
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from datastore import frames
from datastore.errors import MountFailed
from datastore.frames import Message

TIMEOUT_S = 30.0


class Adopted(NamedTuple):
    """A mount that another supervisor made: its descriptors, and what INIT settled."""

    device_fd: int
    opens_fd: int
    negotiated: dict[str, Any]


class Guard:
    """The supervisor's end of the channel. Only the supervisor's thread may use it."""

    def __init__(self, descriptor: int) -> None:
        self._stream = socket.socket(fileno=descriptor)
        self._is_gone = False

    def asked(self) -> tuple[str, Adopted | None]:
        """Return the specification, and the mount to take over, or None to make a new one. Errors: MountFailed."""
        message, descriptors = frames.receive(self._stream, TIMEOUT_S)
        if message.get("adopt") is None:
            return str(message["spec"]), None
        device_fd, opens_fd = descriptors
        return str(message["spec"]), Adopted(device_fd, opens_fd, message["adopt"])

    def tell(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send the guard a message. Errors: MountFailed when the guard is gone."""
        frames.send(self._stream, message, descriptors)

    def news(self) -> str | None:
        """Return the newest specification that has come, or None; don't wait for one. A lost guard is no error."""
        newest: str | None = None
        while not self._is_gone and select.select([self._stream], [], [], 0)[0]:
            try:
                message, _ = frames.receive(self._stream, TIMEOUT_S)
                newest = str(message["spec"]) if "spec" in message else newest
            except MountFailed:
                self._stream.close()
                self._is_gone = True
        return newest
