"""Answers the kernel with EIO while no server can be started, so that nobody waits for ever (S-61)."""

from __future__ import annotations

import errno
import os
import select
import time

from ..kernel import abi, reply

_UNANSWERED = {abi.FORGET, abi.BATCH_FORGET, abi.INTERRUPT}
_BUFFER_BYTES = (1 << 20) + 2 * abi.PAGE_SIZE


class Refusal:
    """Made when it is needed: it holds a buffer of a megabyte. resend: the kernel can send again what a server took."""

    def __init__(self, device_fd: int, *, resend: bool) -> None:
        self._fd = device_fd
        self._buffer = bytearray(_BUFFER_BYTES)
        if resend:
            os.write(device_fd, reply.resend())

    def answer(self, seconds: float) -> None:
        """Refuse what comes within that time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and select.select([self._fd], [], [], left)[0]:
            try:
                length = os.readv(self._fd, (self._buffer,))
            except OSError:
                return  # unmounted, or the caller has left
            if length < abi.HEADER_SIZE:
                return
            header = abi.IN_HEADER.unpack_from(self._buffer)
            if header[1] not in _UNANSWERED:
                self._refuse(header[2])

    def _refuse(self, unique: int) -> None:
        try:
            os.write(self._fd, reply.error(unique, errno.EIO))
        except OSError:
            return  # the caller has left
