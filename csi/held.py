"""A mount's descriptors, and what a keeper needs to go on with it. Two processes hold each: the host and the plugin.

A mount lives while one process has its device open, so either pod may be replaced; whoever comes back takes it from
the other. Nothing of it is on disk, because the specification holds keys.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from datastore.api.mountspec import MountSpec, from_json

from . import frames
from .errors import KeeperAway


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One mount. The descriptors are this process's own copies; close() ends only these."""

    volume_id: str
    spec: MountSpec
    ephemeral: bool
    negotiated: dict[str, Any]
    device_fd: int = field(repr=False)
    opens_fd: int = field(repr=False)

    def document(self) -> frames.Message:
        """Everything but the descriptors; secrets included: for a private socket only."""
        return {
            "volume": self.volume_id,
            "spec": self.spec.to_json(),
            "ephemeral": self.ephemeral,
            "negotiated": self.negotiated,
        }

    def duplicate(self) -> Held:
        """With descriptors of its own."""
        return replace(self, device_fd=os.dup(self.device_fd), opens_fd=os.dup(self.opens_fd))

    def close(self) -> None:
        """Close the descriptors; once."""
        for descriptor in (self.device_fd, self.opens_fd):
            with suppress(OSError):
                os.close(descriptor)


def send(stream: socket.socket, held: Held) -> None:
    """Errors: KeeperAway."""
    frames.send(stream, held.document(), (held.device_fd, held.opens_fd))


def receive(stream: socket.socket, timeout_s: float) -> Held:
    """Errors: KeeperAway, also for a message that is no mount."""
    return parsed(*frames.receive(stream, timeout_s))


def parsed(message: frames.Message, descriptors: list[int]) -> Held:
    """The mount in a message; takes the descriptors. Errors: KeeperAway."""
    try:
        device_fd, opens_fd = descriptors
        return Held(
            volume_id=message["volume"],
            spec=from_json(message["spec"]),
            ephemeral=message["ephemeral"],
            negotiated=message["negotiated"],
            device_fd=device_fd,
            opens_fd=opens_fd,
        )
    except (KeyError, ValueError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise KeeperAway("the other process sent no mount") from None


class Holdings:
    """The mounts that a process holds, by volume. Threads: any. INVARIANT: each entry's descriptors are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}

    def put(self, held: Held) -> None:
        """Hold this one from now on, in place of another of the same volume."""
        with self._lock:
            before = self._held.get(held.volume_id)
            self._held[held.volume_id] = held
        if before is not None:
            before.close()

    def drop(self, volume_id: str) -> None:
        """Let go; of an unknown volume too."""
        with self._lock:
            held = self._held.pop(volume_id, None)
        if held is not None:
            held.close()

    def clear(self) -> None:
        """Let go of all."""
        for volume_id in self.volumes():
            self.drop(volume_id)

    def copy(self, volume_id: str) -> Held | None:
        """With descriptors of its own, which the caller closes."""
        with self._lock:
            held = self._held.get(volume_id)
            return None if held is None else held.duplicate()

    def renew(self, volume_id: str, spec: MountSpec) -> None:
        """Another specification for the same mount."""
        with self._lock:
            held = self._held.get(volume_id)
            if held is not None:
                self._held[volume_id] = replace(held, spec=spec)

    def get(self, volume_id: str) -> Held | None:
        """What is held for a volume; its descriptors may be closed by put() or drop() at any time."""
        with self._lock:
            return self._held.get(volume_id)

    def volumes(self) -> list[str]:
        """All volumes."""
        with self._lock:
            return list(self._held)

    def export(self, stream: socket.socket) -> None:
        """Send the count and copies of all. Errors: KeeperAway."""
        with self._lock:
            copies = [held.duplicate() for held in self._held.values()]
        try:
            frames.send(stream, {"count": len(copies)})
            for held in copies:
                send(stream, held)
        finally:
            for held in copies:
                held.close()


def fetch(stream: socket.socket, timeout_s: float) -> list[Held]:
    """What export() sends. Errors: KeeperAway; then nothing is kept."""
    message, _ = frames.receive(stream, timeout_s)
    found: list[Held] = []
    try:
        for _ in range(int(message.get("count", 0))):
            found.append(receive(stream, timeout_s))
    except BaseException:
        for held in found:
            held.close()
        raise
    return found
