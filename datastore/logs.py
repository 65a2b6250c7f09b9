"""The log format of all processes: time, level, logger, a constant message, key=value fields; secrets are redacted.

log.warning("the server ended", extra=fields(code=1))
"""

from __future__ import annotations

import logging
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path

FIELDS = "datastore_fields"
LOG_LIMIT_BYTES = 4 << 20
REDACTED = "***"
SECRET_PATTERN = re.compile(
    r"(?i)((?:x-amz-(?:signature|credential|security-token)|signature|aws_?secret_?access_?key|secret_?key|session_?token|password"
    r"|authorization)[\"']?\s*[=:]\s*[\"']?)(?:(?:AWS4-HMAC-SHA256|Basic|Bearer)\s+)?[^\s&,;\"']+"
)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` argument of a logging call that has these fields."""
    return {FIELDS: values}


def redact(text: str) -> str:
    """Return the text with REDACTED in place of what looks like a signature, a key or a token."""
    return SECRET_PATTERN.sub(lambda found: found.group(1) + REDACTED, text)


def _shown(value: object) -> str:
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return shlex.quote(text.replace("\n", "\\n"))


class Formatter(logging.Formatter):
    """Writes `2026-01-31T12:00:00Z WARNING datastore.fuse.server message key=value`, in UTC, then any traceback."""

    default_time_format = "%Y-%m-%dT%H:%M:%SZ"
    default_msec_format = ""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the name is logging's)
        line = super().formatMessage(record)
        values: dict[str, object] = getattr(record, FIELDS, {})
        return " ".join([line, *(f"{key}={_shown(value)}" for key, value in values.items())])

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup(level: int = logging.INFO) -> None:
    """Send every log line to standard error in our format; call it once, in a process's main."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def trim(path: Path, limit: int = LOG_LIMIT_BYTES) -> None:
    """Bound a log that processes append to (O_APPEND): a log above `limit` bytes is copied to `path.1` and truncated,
    not renamed, so that the processes keep writing to the same file. Lines that are written between the copy and the
    truncation are lost. If the copy fails, as on a full disk, the log stays whole until the next call."""
    with suppress(OSError):
        if not path.exists() or path.stat().st_size <= limit:
            return
        older = path.with_name(path.name + ".1")
        older.write_bytes(path.read_bytes())
        older.chmod(0o600)
        with path.open("r+b") as current:
            current.truncate(0)


class Limiter:
    """Allows one line per key in each `interval_s`, so that a storage that is down does not fill the log."""

    KEYS = 256

    def __init__(self, interval_s: float = 10.0) -> None:
        self._interval_s = interval_s
        self._last: dict[object, float] = {}

    def allows(self, key: object, now_s: float) -> bool:
        """Return whether to log a line now. now_s: the time by any monotonic clock."""
        last = self._last.get(key)
        if last is not None and now_s - last < self._interval_s:
            return False
        if len(self._last) >= self.KEYS:
            self._last.clear()
        self._last[key] = now_s
        return True
