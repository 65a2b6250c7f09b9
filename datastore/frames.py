"""Messages with file descriptors over a Unix stream socket, between processes of this project.

A message is its length in four bytes (little-endian), then UTF-8 JSON; the descriptors travel with the first byte
(SCM_RIGHTS). The two ends trust each other; still, the length is bounded.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from datastore.errors import MountFailed

LENGTH_BYTES = 4
LIMIT_BYTES = 16 << 20
DESCRIPTORS = 2
"""The most descriptors in a message: a FUSE device and the memory of the mount's passthrough opens."""

Message = dict[str, Any]


class PeerGone(MountFailed):
    """The other end is gone, is silent, or sends something that is not a message."""


def send(stream: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message within the socket's own timeout. Errors: PeerGone, also when the other end reads too slowly."""
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(LENGTH_BYTES, "little") + body
    try:
        if descriptors:
            frame = frame[socket.send_fds(stream, [frame], list(descriptors)) :]
        if frame:  # a peer that has it all may have ended; then even an empty send fails
            stream.sendall(frame)
    except OSError as error:
        raise PeerGone(f"the other process is gone: {error.strerror or error}") from error


def receive(stream: socket.socket, timeout_s: float) -> tuple[Message, list[int]]:
    """Return the next message and its descriptors, which the caller closes. Errors: PeerGone, also at timeout_s."""
    end = time.monotonic() + timeout_s
    descriptors: list[int] = []
    try:
        length = int.from_bytes(_exactly(stream, LENGTH_BYTES, end, descriptors), "little")
        if length > LIMIT_BYTES:
            raise PeerGone(f"a message of {length} bytes is not one of ours")
        message = json.loads(_exactly(stream, length, end, descriptors))
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ValueError):
            raise PeerGone("the other process sent something that is not a message") from None
        raise
    finally:
        stream.settimeout(None)
    return (message if isinstance(message, dict) else {}), descriptors


def _exactly(stream: socket.socket, count: int, end: float, descriptors: list[int]) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise PeerGone("the other process gave no answer in time")
        stream.settimeout(left_s)
        try:
            piece, came, _, _ = socket.recv_fds(stream, count - len(parts), DESCRIPTORS)
        except TimeoutError:
            continue
        except OSError as error:
            raise PeerGone(f"the other process is gone: {error.strerror or error}") from error
        descriptors += came
        for descriptor in came:
            os.set_inheritable(descriptor, False)
        if not piece:
            raise PeerGone("the other process has ended")
        parts += piece
    return bytes(parts)
