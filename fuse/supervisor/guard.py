"""Who started the supervisor may hold its descriptors as well: then the supervisor's own death ends no mount either.

A mount lives as long as one process has its device open. On a cluster's node a supervisor is started by a host process
(datastore.csi.mountdaemon), which gets copies over this channel and gives them to a later supervisor of the same mount.
The messages are those of datastore/frames.py, over the descriptor named by --guard. Two descriptors travel with some:
the device, and the memory of its passthrough opens.

    guard -> supervisor   {"spec": document, "adopt": null}                  mount anew
                          {"spec": document, "adopt": what INIT settled}     serve the mount of these two descriptors
    supervisor -> guard   {"mounted": what INIT settled}                     with both, if it has made the mount
                          {"error": line, "kind": name of the error's class} nothing is mounted anew
    guard -> supervisor   {"spec": document}                                 at any time: for the servers to come
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
    """A mount that another supervisor made: its descriptors, and what the kernel and it settled."""

    device_fd: int
    opens_fd: int
    negotiated: dict[str, Any]


class Guard:
    """The supervisor's end. Threads: the supervisor's one."""

    def __init__(self, descriptor: int) -> None:
        self._stream = socket.socket(fileno=descriptor)
        self._is_gone = False

    def asked(self) -> tuple[str, Adopted | None]:
        """The specification, and the mount to serve, or None to mount anew. Errors: MountFailed."""
        message, descriptors = frames.receive(self._stream, TIMEOUT_S)
        if message.get("adopt") is None:
            return str(message["spec"]), None
        if len(descriptors) != 2:
            raise MountFailed("a mount to go on with came without its descriptors")
        return str(message["spec"]), Adopted(descriptors[0], descriptors[1], message["adopt"])

    def tell(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """How it went. Errors: MountFailed when the guard is gone."""
        frames.send(self._stream, message, descriptors)

    def news(self) -> str | None:
        """The newest specification that has come, if any; never waits. A guard that is gone is not missed."""
        newest: str | None = None
        while not self._is_gone and select.select([self._stream], [], [], 0)[0]:
            try:
                message, _ = frames.receive(self._stream, TIMEOUT_S)
                newest = str(message["spec"]) if "spec" in message else newest
            except MountFailed:
                self._stream.close()
                self._is_gone = True
        return newest
