"""What `doctor` finds: one line each, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from datastore.cli.exitcodes import ExitCode


class Level(StrEnum):
    """fail: it can't work; warn: it works, less well or not for everyone."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. todo: what a person can do, '' when nothing needs doing. code: exit code of a failure."""

    check: str
    level: Level
    text: str
    todo: str = ""
    code: ExitCode = ExitCode.ERROR


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, todo: str) -> Finding:
    """Not as good as it could be."""
    return Finding(check, Level.WARN, text, todo)


def bad(check: str, text: str, todo: str, code: ExitCode = ExitCode.ERROR) -> Finding:
    """Can't work this way."""
    return Finding(check, Level.FAIL, text, todo, code)
