"""The entry point. A mount's supervisor is started before the rest is imported, which takes a third of a second."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

from datastore.mounting import launch
from datastore.mounting.signals import keyboard

_ERROR = 1
_INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point of `datastore` and `kubectl-datastore`."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: a log or a name may hold what the terminal's encoding can't say.
        sys.stdout.reconfigure(errors="backslashreplace")
    leave(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a verb with its arguments and return the exit code."""
    if why := _no_directory():
        sys.stderr.write(f"error: {why}\n")
        return _ERROR
    with keyboard() as came:
        try:
            launch.begin(arguments)
            from datastore.cli import app

            return app.exit_code_of(lambda: app.run(arguments), came)
        except BaseException:
            if not came:
                raise
            sys.stderr.write("error: interrupted\n")  # SIGINT came during the import
            return _INTERRUPTED


def _no_directory() -> str:
    """Return what is wrong with the current directory; '' if we can be imported there (also if it was removed)."""
    try:
        os.getcwd()
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"the current directory can't be used ({error.strerror}), perhaps its mount ended: cd to another one"
    return ""


def _open_closed_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed, as `>&-` does: its number would go to the next file
    that is opened, and our output into that."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def leave(code: int) -> NoReturn:
    """Flush the output and end at once: taking the imported libraries apart one by one would cost another 40 ms."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the reader of our output has closed the pipe
    except OSError as error:
        sys.stderr.write(f"error: standard output: {error.strerror}\n")
        code = code or _ERROR
    sys.stderr.flush()
    os._exit(code)
