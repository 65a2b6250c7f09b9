"""The findings of `doctor`: one line for each check, with what to do about a problem."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from datastore.cli.exitcodes import ExitCode


class Level(StrEnum):
    """fail: what is checked can't work; warn: it works, but less well than it could or not for every user."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. todo: what the user can do, '' if nothing need be done. code: exit code of a failure."""

    check: str
    level: Level
    text: str
    todo: str = ""
    code: ExitCode = ExitCode.ERROR


def ok(check: str, text: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, todo: str) -> Finding:
    """Return a finding about something that works, but less well than it could."""
    return Finding(check, Level.WARN, text, todo)


def bad(check: str, text: str, todo: str, code: ExitCode = ExitCode.ERROR) -> Finding:
    """Return a finding about something that can't work as it is."""
    return Finding(check, Level.FAIL, text, todo, code)
