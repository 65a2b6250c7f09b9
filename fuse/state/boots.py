"""Whether the machine was started anew since: what was only in its memory then may be gone, in any order."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Another one after each start of the kernel; '' where nobody tells."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
