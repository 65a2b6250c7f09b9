"""How soon a dead server is replaced, and who is refused meanwhile. Pure: times are given, in seconds of one clock."""

from __future__ import annotations

from datastore.ourprocess import STABLE_S, Backoff


class Outage:
    """The time since a server last lived. limit_s: callers wait for so long, about."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.backoff = Backoff()
        self._limit_s = limit_s
        self._began = self._started = self._served = now

    def started(self, now: float) -> None:
        """A server was started, whether it serves or not."""
        self._started = now

    def served(self, now: float) -> None:
        """It was given the mount."""
        self._served = now

    def lives(self, now: float) -> float:
        """The server lived until now, at least: for how many seconds."""
        lived_s = now - self._started
        if lived_s > STABLE_S:
            self._began = now
        return lived_s

    def died(self, now: float) -> None:
        """The server died, after lives()."""
        self.backoff.ended(now - self._started)

    def patience_s(self, now: float, *, resend: bool) -> float | None:
        """Who waited longer than this is refused in the pause; None: nobody yet.

        When none served for the whole limit, all are. When some did, and died young, only who waited for half of it: a
        request on which each server dies, but none that the next one may answer. resend: a request that was looked at
        can be left to the next server.
        """
        down_s = now - self._began
        if now - self._served > self._limit_s or (down_s > self._limit_s and not resend):
            return 0.0
        return self._limit_s / 2 if resend and down_s > self._limit_s / 2 else None
