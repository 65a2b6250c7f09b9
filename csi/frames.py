"""Messages between the plugin, the keeper's host and its keepers: datastore.frames; who is gone is a KeeperAway."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from datastore import frames
from datastore.frames import Message, PeerGone

from .errors import KeeperAway

__all__ = ["Message", "receive", "send"]


def send(stream: socket.socket, message: Message, descriptors: Sequence[int] = (), timeout_s: float = 10.0) -> None:
    """Errors: KeeperAway when the other end is gone or takes nothing."""
    stream.settimeout(timeout_s)
    try:
        frames.send(stream, message, descriptors)
    except PeerGone as error:
        raise KeeperAway(str(error)) from error


def receive(stream: socket.socket, timeout_s: float) -> tuple[Message, list[int]]:
    """The next message and its descriptors, which the caller closes. Errors: KeeperAway, also at timeout_s."""
    try:
        return frames.receive(stream, timeout_s)
    except PeerGone as error:
        raise KeeperAway(str(error)) from error
