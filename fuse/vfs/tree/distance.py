"""How far away the store is, by what listings took. Pure."""

from __future__ import annotations

from collections import deque

FAR_S = 0.005
"""A directory of the usual size is listed faster by a store that is near."""
_LAST = 4
_TOLD = 2
"""One listing may have taken long for another reason: it was tried again, or this machine was busy."""


class Distance:
    """Of one mount."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_LAST)

    def listed(self, took_s: float) -> None:
        """A directory was listed, in so many seconds."""
        self._last.append(took_s)

    @property
    def is_far(self) -> bool:
        """Whether waiting for one more answer costs more than asking for what may not be wanted."""
        return len(self._last) >= _TOLD and min(self._last) >= FAR_S
