"""Arguments and options that several verbs share, and the parsing of those with a form of their own."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from datastore.api.resolve import MountOptions
from datastore.cli.console import Format
from datastore.cli.inspection import complete_mounted


class TransportChoice(StrEnum):
    """Who speaks to the kernel."""

    KERNEL = "kernel"
    LIBFUSE = "libfuse"


DEFAULT_TRANSPORT = TransportChoice.KERNEL if sys.platform.startswith("linux") else TransportChoice.LIBFUSE

ReadOnly = Annotated[bool, typer.Option("--read-only", "-r", help="Refuse every change, whatever the manifest says.")]
AllowOther = Annotated[
    bool, typer.Option("--allow-other", help="Let other users in; plain users need user_allow_other in /etc/fuse.conf.")
]
Transport = Annotated[
    TransportChoice, typer.Option("--transport", help="kernel: our own protocol engine; libfuse: through libfuse.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="DIR|NAME", help="Directory or name of a mounted Datastore.", autocompletion=complete_mounted
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="How to print.")]


def mount_options(read_only: bool, allow_other: bool, transport: TransportChoice) -> MountOptions:
    """The options as the resolver takes them."""
    kind = "kernel" if transport is TransportChoice.KERNEL else "libfuse"
    return MountOptions(read_only=read_only, allow_other=allow_other, transport=kind)  # type: ignore[arg-type]
