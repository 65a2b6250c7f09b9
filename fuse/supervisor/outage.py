"""While no server lives: how soon the next one is tried, and who gets EIO, so that nobody waits for ever (S-61).

Outage is pure: times are given, in seconds of one clock.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress

from datastore.ourprocess import STABLE_S, Backoff

from ..kernel import abi, reply

_GONE = {errno.ENODEV, errno.ECONNABORTED}
"""Unmounted, or the connection was aborted."""
_LEFT = {errno.ENOENT, errno.EINTR, errno.EAGAIN}
"""The caller has left before we read what he asked."""
_AGAIN_S = 0.1
"""Before a device is tried again that could not be read for another reason: no memory."""
_BUFFER_BYTES = (1 << 20) + 2 * abi.PAGE_SIZE


class Outage:
    """The time since a server last lived. limit_s: callers wait for so long, about."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.backoff = Backoff()
        self._limit_s = limit_s
        self._began = now
        self.started = self.served = now
        """When a server was started, whether it served or not, and when one was given the mount: the latest."""

    def lives(self, now: float) -> float:
        """The server lived until now, at least: for how many seconds."""
        lived_s = now - self.started
        if lived_s > STABLE_S:
            self._began = now
        return lived_s

    def died(self, now: float) -> None:
        """The server died, after lives()."""
        self.backoff.ended(now - self.started)

    def patience_s(self, now: float, *, resend: bool) -> float | None:
        """Who waited longer than this is refused in the pause; None: nobody yet.

        When none served for the whole limit, all are. When some did, and died young, only who waited for half of it: a
        request on which each server dies, but none that the next one may answer. resend: a request that was looked at
        can be left to the next server.
        """
        down_s = now - self._began
        if now - self.served > self._limit_s or (down_s > self._limit_s and not resend):
            return 0.0
        return self._limit_s / 2 if resend and down_s > self._limit_s / 2 else None


class Refusal:
    """Made when it is needed: it holds a buffer of a megabyte.

    resend: the kernel can send again what somebody took. Then a request may be looked at and left to the next server.
    """

    def __init__(self, device_fd: int, *, resend: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._fd = device_fd
        self._resend = resend
        self._clock = clock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._since: dict[int, float] = {}
        """When each request that nobody has answered was first seen here."""

    def answer(self, seconds: float, *, older_than_s: float = 0.0) -> bool:
        """Refuse for so long what comes, and what waits; of that only what was seen here `older_than_s` ago.

        False, and at once, when there is no mount any more.
        """
        end = self._clock() + seconds
        before, self._since = self._since, {}
        if self._resend:
            with suppress(OSError):  # unmounted, or the kernel has no room: what waits is looked at later
                os.write(self._fd, reply.resend())
        while (left := end - self._clock()) > 0 and select.select([self._fd], [], [], left)[0]:
            unique = self._take()
            if unique is None:
                return False
            if not unique:
                continue
            now, request = self._clock(), unique & ~abi.UNIQUE_RESEND
            since = before.get(request, now)
            if now - since >= older_than_s:
                with suppress(OSError):  # the caller has left
                    os.write(self._fd, reply.error(unique, errno.EIO))
            else:
                self._since[request] = since
        return True

    def _take(self) -> int | None:
        """The number of the next request, as it came; 0: nobody waits for an answer; None: there is no mount."""
        try:
            length = os.readv(self._fd, (self._buffer,))
        except OSError as error:
            if error.errno in _GONE:
                return None
            if error.errno not in _LEFT:
                time.sleep(_AGAIN_S)
            return 0
        if length < abi.HEADER_SIZE:
            return None
        header = abi.IN_HEADER.unpack_from(self._buffer)
        return 0 if header[1] in abi.UNANSWERED else header[2]
