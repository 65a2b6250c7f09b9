"""`datastore version`."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

DISTRIBUTION = "kube-datastore"


def version_command() -> None:
    """Print the version."""
    sys.stdout.write(f"{DISTRIBUTION} {installed_version()}\n")


def _print_and_end(asked: bool) -> None:
    if asked:
        version_command()
        raise typer.Exit


def version_option(
    asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_and_end, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a verb; the help text is the application's, not this one."""


def installed_version() -> str:
    """Return the version of the installed distribution, or a text that says that this is a bare checkout."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed, running from a checkout)"
