"""Messages between the keeper and its server: JSON over a Unix stream socket, a descriptor beside some.

A message is four bytes of length (little-endian), then UTF-8 JSON; the descriptor travels with the first byte
(SCM_RIGHTS). The two ends trust each other (a socketpair); the length is bounded all the same.

    keeper -> server   {"prepare": true}                        perhaps; answered by {"prepared": true}
    keeper -> server   {"spec": document, "resumed": bool, "restarts": n, "log": path}
                                                                with memory that outlives the server
    server -> keeper   {"probed": true}  or  {"error": line, "kind": name of the error's class}
    keeper -> server   {"serve": true, "negotiated": null or what INIT settled before}     with the device's descriptor
    server -> keeper   {"negotiated": {...}}                    from now on the mount answers
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from datastore.errors import MountFailed

MESSAGE_LIMIT = 16 << 20
LENGTH_BYTES = 4


class ChannelClosed(MountFailed):
    """The other end is gone."""


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

    def send(self, message: dict[str, Any], descriptor: int = -1) -> None:
        """Send a message, with a descriptor unless it is -1. Errors: ChannelClosed."""
        body = json.dumps(message).encode()
        frame = len(body).to_bytes(LENGTH_BYTES, "little") + body
        try:
            if descriptor >= 0:
                frame = frame[socket.send_fds(self._stream, [frame], [descriptor]) :]
            if frame:  # who has all of it may have answered and ended: to send nothing would fail
                self._stream.sendall(frame)
        except OSError as error:
            raise ChannelClosed(f"the other process is gone: {error.strerror}") from error

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], int]:
        """The next message and its descriptor (or -1). Errors: ChannelClosed, also when nothing came in timeout_s."""
        end = time.monotonic() + timeout_s
        head, descriptor = self._exactly(LENGTH_BYTES, end)
        length = int.from_bytes(head, "little")
        if length > MESSAGE_LIMIT:
            raise ChannelClosed(f"a message of {length} bytes is not one of ours")
        body, _ = self._exactly(length, end)
        message = json.loads(body)
        return (message if isinstance(message, dict) else {}), descriptor

    def _exactly(self, count: int, end: float) -> tuple[bytes, int]:
        parts, descriptor = bytearray(), -1
        while len(parts) < count:
            left = end - time.monotonic()
            if left <= 0:
                raise ChannelClosed("the other process gave no answer in time")
            self._stream.settimeout(left)
            try:
                piece, descriptors, _, _ = socket.recv_fds(self._stream, count - len(parts), 1)
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelClosed(f"the other process is gone: {error.strerror}") from error
            finally:
                self._stream.settimeout(None)
            if not piece:
                raise ChannelClosed("the other process has ended")
            parts += piece
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
        return bytes(parts), descriptor
