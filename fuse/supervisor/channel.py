"""Messages between the supervisor and its server, a descriptor beside some (datastore/frames.py), over a socketpair.

supervisor -> server   {"prepare": true}      perhaps; answered by {"prepared": true}
supervisor -> server   {"spec": document, "resumed": bool, "restarts": n, "log": path}
                                              with memory that outlives the server
server -> supervisor   {"probed": true}  or  {"error": line, "kind": name of the error's class}
supervisor -> server   {"serve": true, "negotiated": null or what INIT settled before}     with the device's descriptor
server -> supervisor   {"negotiated": {...}}  from now on the mount answers
"""

from __future__ import annotations

import os
import socket

from datastore import frames
from datastore.errors import DatastoreError
from datastore.frames import Message


class Channel:
    """One end. Threads: one sender and one receiver."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def fileno(self) -> int:
        """For select()."""
        return self._stream.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def send(self, message: Message, descriptor: int = -1) -> None:
        """Send a message, with a descriptor unless it is -1. Errors: PeerGone."""
        frames.send(self._stream, message, () if descriptor < 0 else (descriptor,))

    def receive(self, timeout_s: float) -> tuple[Message, int]:
        """The next message and its descriptor (or -1). Errors: PeerGone, also when nothing came in timeout_s."""
        try:
            message, descriptors = frames.receive(self._stream, timeout_s)
        finally:
            self._stream.settimeout(None)
        for more in descriptors[1:]:
            os.close(more)
        return message, descriptors[0] if descriptors else -1


def error_in(message: Message) -> DatastoreError:
    """The error that the server reports, under the name of its class."""
    error: type[DatastoreError] = type(str(message.get("kind", "DatastoreError")), (DatastoreError,), {})
    return error(str(message["error"]))
