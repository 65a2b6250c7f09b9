"""Decides what to do while no server lives: when to try the next one, and which callers get EIO so that none waits
forever (S-61). Outage is pure: the times are arguments, in seconds of one clock."""

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
"""The errors of reading the device when it is unmounted or the connection was aborted."""
_LEFT = {errno.ENOENT, errno.EINTR, errno.EAGAIN}
"""The errors when the caller has withdrawn its request before we read it."""
_AGAIN_S = 0.1
"""The pause before the device is read again after another error, such as a lack of memory."""
_BUFFER_BYTES = (1 << 20) + 2 * abi.PAGE_SIZE


class Outage:
    """Measures how long no server has lived. limit_s: about how long a caller waits before it gets EIO."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.backoff = Backoff()
        self._limit_s = limit_s
        self._began = now
        self.started = self.served = now
        """started: when a server was last started, even one that never served. served: when one last began to serve."""

    def lives(self, now: float) -> float:
        """Note that the server lived until now, or has just died; return for how many seconds it has lived."""
        lived_s = now - self.started
        if lived_s > STABLE_S:
            self._began = now
        return lived_s

    def died(self, now: float) -> None:
        """Note that the server died. lives() has to be called before."""
        self.backoff.ended(now - self.started)

    def patience_s(self, now: float, *, resend: bool) -> float | None:
        """Return how long a caller must have waited to be refused in the pause that comes; None: none is refused yet.

        When no server served for the whole limit, all callers are refused. When servers did, and died young, only
        callers that waited for half of the limit are: a request on which each server dies is refused, but not one that
        the next server may answer. resend: a request that was read can be left to the next server; if not, all callers
        are refused then too, after the whole limit."""
        down_s = now - self._began
        if now - self.served > self._limit_s or (down_s > self._limit_s and not resend):
            return 0.0
        return self._limit_s / 2 if resend and down_s > self._limit_s / 2 else None


class Refusal:
    """Answers requests with EIO in place of a server. Made only when it is needed: it holds a buffer of a megabyte.
    resend: the kernel can send requests again, so that one may be read here and left to the next server."""

    def __init__(self, device_fd: int, *, resend: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._fd = device_fd
        self._resend = resend
        self._clock = clock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._since: dict[int, float] = {}
        """When each request that was left to the next server was first read here, by `unique`."""

    def answer(self, seconds: float, *, older_than_s: float = 0.0) -> bool:
        """For `seconds`, answer EIO to each request that was first read here at least `older_than_s` ago (0: to all).
        Return False, and at once, when there is no mount any more."""
        end = self._clock() + seconds
        before, self._since = self._since, {}
        if self._resend:
            with suppress(OSError):  # unmounted, or the kernel has no memory: waiting requests are read later
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
                with suppress(OSError):  # the request was interrupted
                    os.write(self._fd, reply.error(unique, errno.EIO))
            else:
                self._since[request] = since
        return True

    def _take(self) -> int | None:
        """Read a request and return its `unique`; 0: nobody waits for an answer; None: there is no mount any more."""
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
