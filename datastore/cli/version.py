"""`datastore version`."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "kube-datastore"


def version_command() -> None:
    """Print the version."""
    sys.stdout.write(f"{DISTRIBUTION} {installed_version()}\n")


def installed_version() -> str:
    """The version of the installed distribution; a bare checkout has none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed, running from a checkout)"
