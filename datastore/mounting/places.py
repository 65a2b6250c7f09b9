"""Where local state and the cache live, by the XDG base directory specification."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastore.errors import MountFailed


def _base(variable: str, fallback: str) -> Path:
    # The specification: a relative path in such a variable is to be ignored.
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / fallback


def state_root() -> Path:
    """Holds one directory for each mount."""
    return _base("XDG_STATE_HOME", ".local/state") / "kube-datastore" / "mounts"


def cache_root() -> Path:
    """Shared by all mounts of a user whose manifest names no other."""
    return _base("XDG_CACHE_HOME", ".cache") / "kube-datastore" / "objects"


def make_private(path: Path) -> None:
    """Create a directory of state that only its owner can enter; an existing one is tightened. Errors: MountFailed."""
    with _telling(path, "state", "set XDG_STATE_HOME to a directory of yours"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)


def make_cache(path: Path) -> None:
    """Create a cache directory unless it is there. Errors: MountFailed."""
    with _telling(path, "cache", "set spec.cache.dir, or XDG_CACHE_HOME, to a directory of yours"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _telling(path: Path, what: str, todo: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MountFailed(
            f"{path}: this directory for the {what} of mounts can't be made: {error.strerror}; {todo}"
        ) from error
