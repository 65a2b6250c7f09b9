"""datastore.frames for messages between plugin, mount daemon and supervisors: a lost peer raises NotAnswering."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from datastore import frames
from datastore.frames import Message, PeerGone

from .errors import NotAnswering

__all__ = ["Message", "receive", "send"]


def send(stream: socket.socket, message: Message, descriptors: Sequence[int] = (), timeout_s: float = 10.0) -> None:
    """Errors: NotAnswering when the other end is gone, or does not read within timeout_s."""
    try:
        stream.settimeout(timeout_s)
        frames.send(stream, message, descriptors)
    except (PeerGone, OSError) as error:  # OSError: the stream was closed at this end
        raise NotAnswering(str(error)) from error


def receive(stream: socket.socket, timeout_s: float) -> tuple[Message, list[int]]:
    """Return the next message and its descriptors, which the caller closes. Errors: NotAnswering, also at timeout_s."""
    try:
        return frames.receive(stream, timeout_s)
    except PeerGone as error:
        raise NotAnswering(str(error)) from error
