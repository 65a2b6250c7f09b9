"""The front door. What a mount needs is started before the rest is imported, which takes a third of a second."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from datastore.cli import launch

_ERROR = 1


def main() -> NoReturn:
    """Entry point of `datastore` and `kubectl-datastore`."""
    launch.begin(sys.argv[1:])
    from datastore.cli.app import app, exit_code_of

    _leave(exit_code_of(lambda: app(standalone_mode=False)))


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
