"""Words the message that the storage of a mount does not answer or refuses access, from the mount server's status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_DAY_S = 24 * 3600.0


def storage_words(seen: Mapping[str, Any]) -> str:
    """Return what the user must know about a mount's storage: what is wrong and why, or '' when nothing is."""
    silent = seen.get("storage")
    if not silent:
        return ""
    words = _silence(silent)
    if time.time() - silent["lastAsked"] > 1:
        words += f" (last asked at {_clock(silent['lastAsked'])})"
    return f"{words}: {silent['error']}" if silent["error"] else words


def state_words(seen: Mapping[str, Any]) -> str:
    """Return the mount's state and, while its storage does not answer or refuses access, a few words about that."""
    silent = seen.get("storage")
    return f"{seen['state']}, {_silence(silent)}" if silent else seen["state"]


def _silence(silent: Mapping[str, Any]) -> str:
    """Say what is wrong with the storage, and since when if the mount has a server of ours that watches it."""
    if silent.get("refuses"):
        return f"storage has refused access since {_clock(silent['since'])}"
    if "since" in silent:
        return f"storage has not answered since {_clock(silent['since'])}"
    return "storage does not answer"


def _clock(unix_s: float) -> str:
    """Return the local time, with the date if it is half a day ago or longer."""
    form = "%H:%M:%S" if time.time() - unix_s < _DAY_S / 2 else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, time.localtime(unix_s))
