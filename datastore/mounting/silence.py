"""The words by which a user is told that the storage of a mount does not answer, from the mount server's status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_DAY_S = 24 * 3600.0


def storage_words(seen: Mapping[str, Any]) -> str:
    """Return what the user has to know of a mount's storage: that it does not answer and why, or '' when it answers."""
    silent = seen.get("storage")
    if not silent:
        return ""
    words = _silence(silent)
    if time.time() - silent["lastAsked"] > 1:
        words += f" (last asked at {_clock(silent['lastAsked'])})"
    return f"{words}: {silent['error']}" if silent["error"] else words


def state_words(seen: Mapping[str, Any]) -> str:
    """Return the mount's state and, while its storage does not answer, a few words about that."""
    silent = seen.get("storage")
    return f"{seen['state']}, {_silence(silent)}" if silent else seen["state"]


def _silence(silent: Mapping[str, Any]) -> str:
    """Say that the storage does not answer, and since when if the mount has a server of ours that watches it."""
    if "since" in silent:
        return f"storage has not answered since {_clock(silent['since'])}"
    return "storage does not answer"


def _clock(unix_s: float) -> str:
    """Return the local time, with the date if it is half a day ago or longer."""
    form = "%H:%M:%S" if time.time() - unix_s < _DAY_S / 2 else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, time.localtime(unix_s))
