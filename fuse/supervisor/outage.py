"""How soon a dead server is replaced, and who is refused meanwhile. Pure: times are given, in seconds of one clock."""

from __future__ import annotations

STABLE_S = 0.3
"""A server that served longer than this is replaced at once: one that dies of what it is asked does so sooner."""
QUICK_DEATHS = 3
"""So many that served shorter, one after the other, are replaced at once too; then the pause doubles."""
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 5.0


def pause_after(quick_deaths: int) -> float:
    """Seconds to wait before the next server."""
    late = quick_deaths - QUICK_DEATHS
    return 0.0 if late <= 0 else min(BACKOFF_FIRST_S * 2 ** min(late - 1, 10), BACKOFF_LAST_S)


class Outage:
    """The time since a server last lived. limit_s: callers wait for so long, about."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._quick_deaths = 0
        self._began = self._started = self._served = now

    def started(self, now: float) -> None:
        """A server was started, whether it serves or not."""
        self._started = now

    def served(self, now: float) -> None:
        """It was given the mount."""
        self._served = now

    def lives(self, now: float) -> float:
        """The server lived until now, at least: for how many seconds."""
        if self.is_over(now):
            self._began, self._quick_deaths = now, 0
        return now - self._started

    def is_over(self, now: float) -> bool:
        """Whether a server that is alive now has lived long enough to be relied on."""
        return now - self._started > STABLE_S

    def died(self, now: float) -> None:
        """The server died, after lives()."""
        self._quick_deaths += not self.is_over(now)

    def failed(self, now: float) -> None:
        """None could even be started."""
        self._started = now
        self._quick_deaths += 1

    def pause_s(self) -> float:
        """Before the next server is started."""
        return pause_after(self._quick_deaths)

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
