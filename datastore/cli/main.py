"""The front door. What a mount needs is started before the rest is imported, which takes a third of a second."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from datastore.cli import launch
from datastore.cli.signals import keyboard

_ERROR = 1
_INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point of `datastore` and `kubectl-datastore`."""
    with keyboard() as came:
        try:
            launch.begin(sys.argv[1:])
            from datastore.cli.app import app, exit_code_of

            code = exit_code_of(lambda: app(standalone_mode=False), came)
        except BaseException:
            if not came:
                raise
            sys.stderr.write("error: interrupted\n")  # while it imported
            code = _INTERRUPTED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End at once: taking the imported libraries apart, one object after the other, would cost another 40 ms."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # whoever read our output has seen enough
    except OSError as error:
        sys.stderr.write(f"error: standard output: {error.strerror}\n")
        code = code or _ERROR
    sys.stderr.flush()
    os._exit(code)
