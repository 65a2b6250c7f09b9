"""The directories of local state and of the cache, by the XDG base directory specification."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastore.errors import MountFailed


def _base(variable: str, fallback: str) -> Path:
    # By the specification, a relative path in the variable is ignored.
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / fallback


def state_root() -> Path:
    """Return the directory that holds a state directory for each mount."""
    return _base("XDG_STATE_HOME", ".local/state") / "kube-datastore" / "mounts"


def cache_root() -> Path:
    """Return the cache directory of all mounts of a user whose manifests name no other."""
    return _base("XDG_CACHE_HOME", ".cache") / "kube-datastore" / "objects"


def make_private(path: Path) -> None:
    """Create a state directory that only its owner can enter; an existing one gets this mode. Errors: MountFailed."""
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
