"""Messages between plugin, mount daemon and supervisors: datastore.frames; who is gone is a NotAnswering."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from datastore import frames
from datastore.frames import Message, PeerGone

from .errors import NotAnswering

__all__ = ["Message", "receive", "send"]


def send(stream: socket.socket, message: Message, descriptors: Sequence[int] = (), timeout_s: float = 10.0) -> None:
    """Errors: NotAnswering when the other end is gone or takes nothing."""
    try:
        stream.settimeout(timeout_s)
        frames.send(stream, message, descriptors)
    except (PeerGone, OSError) as error:  # OSError: we have closed the stream ourselves
        raise NotAnswering(str(error)) from error


def receive(stream: socket.socket, timeout_s: float) -> tuple[Message, list[int]]:
    """The next message and its descriptors, which the caller closes. Errors: NotAnswering, also at timeout_s."""
    try:
        return frames.receive(stream, timeout_s)
    except PeerGone as error:
        raise NotAnswering(str(error)) from error
