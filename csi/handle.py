"""Mount handles: a mount's descriptors, and all else that a supervisor needs to continue the mount.

A mount lives while a process has its FUSE device open. The mount daemon and the plugin both have handles, so either pod
may be replaced and gets them back from the other. They are not written to disk, because the specification holds keys.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from datastore.api.mountspec import MountSpec, from_json
from datastore.errors import InvalidManifest
from datastore.logs import fields

from . import frames
from .errors import NotAnswering
from .mounter import MountedVolume

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MountHandle(MountedVolume):
    """The handle of one mount. Its descriptors are this process's own copies; close() closes only these."""

    negotiated: dict[str, Any]
    device_fd: int = field(repr=False)
    opens_fd: int = field(repr=False)

    def document(self) -> frames.Message:
        """Return all but the descriptors, with the secrets: only for a private socket."""
        return {
            "volume": self.volume_id,
            "spec": self.spec.to_json(),
            "ephemeral": self.ephemeral,
            "negotiated": self.negotiated,
        }

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors in the order in which they are sent."""
        return self.device_fd, self.opens_fd

    def duplicate(self) -> MountHandle:
        """Return a copy with descriptors of its own."""
        return replace(self, device_fd=os.dup(self.device_fd), opens_fd=os.dup(self.opens_fd))

    def close(self) -> None:
        """Close the descriptors; to be called once."""
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)


def send_handle(stream: socket.socket, handle: MountHandle) -> None:
    """Errors: NotAnswering."""
    frames.send(stream, handle.document(), handle.descriptors)


def receive_handle(stream: socket.socket, timeout_s: float) -> MountHandle:
    """Errors: NotAnswering, also for a message that is no handle; InvalidManifest for a handle of another release."""
    return parse_handle(*frames.receive(stream, timeout_s))


def parse_handle(message: frames.Message, descriptors: list[int]) -> MountHandle:
    """Return the handle in a message; it owns the descriptors. An error closes them. Errors: as receive_handle()."""
    try:
        device_fd, opens_fd = descriptors
        return MountHandle(
            volume_id=message["volume"],
            spec=from_json(message["spec"]),
            ephemeral=message["ephemeral"],
            negotiated=message["negotiated"],
            device_fd=device_fd,
            opens_fd=opens_fd,
        )
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, KeyError | ValueError):
            raise NotAnswering("the other process sent no mount") from None
        raise


class HandleTable:
    """The handles of a process, by volume. Any thread may use it. INVARIANT: each entry's descriptors are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, MountHandle] = {}

    def put(self, handle: MountHandle) -> None:
        """Keep the handle, and close an earlier one of the same volume."""
        with self._lock:
            before = self._handles.get(handle.volume_id)
            self._handles[handle.volume_id] = handle
        if before is not None:
            before.close()

    def drop(self, volume_id: str) -> None:
        """Close and forget a volume's handle, if there is one."""
        with self._lock:
            handle = self._handles.pop(volume_id, None)
        if handle is not None:
            handle.close()

    def clear(self) -> None:
        """Close and forget all handles."""
        for volume_id in self.volumes():
            self.drop(volume_id)

    def copy(self, volume_id: str) -> MountHandle | None:
        """Return a copy of a volume's handle, whose descriptors the caller closes."""
        with self._lock:
            handle = self._handles.get(volume_id)
            return None if handle is None else handle.duplicate()

    def renew(self, volume_id: str, spec: MountSpec) -> None:
        """Note a new specification of the same mount."""
        with self._lock:
            handle = self._handles.get(volume_id)
            if handle is not None:
                self._handles[volume_id] = replace(handle, spec=spec)

    def get(self, volume_id: str) -> MountHandle | None:
        """The handle of a volume; its descriptors may be closed by put() or drop() at any time."""
        with self._lock:
            return self._handles.get(volume_id)

    def volumes(self) -> list[str]:
        with self._lock:
            return list(self._handles)

    def export(self, stream: socket.socket) -> None:
        """Send the number of handles, then copies of all. Errors: NotAnswering."""
        with self._lock:
            copies = [handle.duplicate() for handle in self._handles.values()]
        try:
            frames.send(stream, {"count": len(copies)})
            for handle in copies:
                send_handle(stream, handle)
        finally:
            for handle in copies:
                handle.close()


def fetch_handles(stream: socket.socket, timeout_s: float) -> list[MountHandle]:
    """Receive what export() sends; handles in another release's format are left out.

    Errors: NotAnswering; then no descriptor stays open.
    """
    message, _ = frames.receive(stream, timeout_s)
    found: list[MountHandle] = []
    try:
        for _ in range(int(message.get("count", 0))):
            try:
                found.append(receive_handle(stream, timeout_s))
            except InvalidManifest as error:
                log.error("a mount of another release can't be taken over", extra=fields(reason=error))
    except BaseException:
        for handle in found:
            handle.close()
        raise
    return found
