"""Small files that only their owner can read. They are replaced atomically: a reader sees the old text or the new."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping; see write_text()."""
    write_text(path, json.dumps(data))


def write_text(path: Path, text: str) -> None:
    """Replace the file, or make it. The text is on the disk before the file has its name. Errors: OSError, which names
    the file; nothing half-made stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
