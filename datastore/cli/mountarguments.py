"""The options of the verbs that mount, and what they mean."""

from __future__ import annotations

import grp
import pwd
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from datastore.api.manifest import load
from datastore.api.mountspec import DEFAULT_MEMORY_BYTES, LEAST_MEMORY_BYTES
from datastore.api.resolve import MountOptions
from datastore.errors import DatastoreError
from datastore.units import format_quantity, parse_quantity, parse_umask


class TransportChoice(StrEnum):
    """What speaks the FUSE protocol with the kernel: our own engine, or libfuse."""

    KERNEL = "kernel"
    LIBFUSE = "libfuse"


NO_ID = (1 << 32) - 1
"""The id by which chown(2) is told to leave the owner or group unchanged; no user or group has it."""
DEFAULT_TRANSPORT = TransportChoice.KERNEL if sys.platform.startswith("linux") else TransportChoice.LIBFUSE

ReadOnly = Annotated[bool, typer.Option("--read-only", "-r", help="Refuse every change, whatever the manifest says.")]
AllowOther = Annotated[
    bool,
    typer.Option(
        "--allow-other",
        help="Let other users use the mount. Unless root mounts, this needs user_allow_other in /etc/fuse.conf.",
    ),
]
Transport = Annotated[
    TransportChoice,
    typer.Option(
        "--transport",
        help="How the mount speaks to the kernel: by this program's own FUSE engine (kernel), or through libfuse.",
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Address at which the mount serves Prometheus metrics, e.g. 127.0.0.1:9464. Default: none.",
    ),
]
DEFAULT_MEMORY = format_quantity(DEFAULT_MEMORY_BYTES)
"""The default of --memory. Below 192Mi, the least, the interpreter and its threads alone would soon need more."""
Memory = Annotated[
    str,
    typer.Option("--memory", metavar="SIZE", help="The memory limit of the mount's server; at least 192Mi."),
]
Uid = Annotated[
    str,
    typer.Option(
        "--uid",
        metavar="USER",
        help="For s3: owner, by name or number, of files for which the bucket has none. Default: the user who mounts.",
    ),
]
Gid = Annotated[
    str,
    typer.Option(
        "--gid",
        metavar="GROUP",
        help="For s3: group, by name or number, of files for which the bucket has none. Default: that of the "
        "user who mounts.",
    ),
]
Umask = Annotated[
    str,
    typer.Option(
        "--umask",
        metavar="OCTAL",
        help="For s3: permissions, in octal, that are taken from files for which the bucket has none, as by "
        "umask(1). Default: 022.",
    ),
]


def mount_options(
    read_only: bool,
    allow_other: bool,
    transport: TransportChoice,
    metrics: str = "",
    memory: str = DEFAULT_MEMORY,
    uid: str = "",
    gid: str = "",
    umask: str = "",
) -> MountOptions:
    """Return the options in the resolver's form. Errors: typer.BadParameter."""
    kind = "kernel" if transport is TransportChoice.KERNEL else "libfuse"
    return MountOptions(
        read_only=read_only,
        allow_other=allow_other,
        transport=kind,  # type: ignore[arg-type]
        metrics=metrics,
        memory_bytes=_memory_bytes(memory),
        uid=_id("--uid", uid, lambda name: pwd.getpwnam(name).pw_uid) if uid else None,
        gid=_id("--gid", gid, lambda name: grp.getgrnam(name).gr_gid) if gid else None,
        umask=_umask(umask) if umask else None,
    )


def complete_datastores(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the Datastores in the FILE of the command line, for shell completion."""
    file = context.params.get("file")
    if not file or file == "-":  # during completion, standard input is the user's terminal
        return []
    try:
        manifest = load(file)
    except DatastoreError:
        return []
    return sorted(each.name for each in manifest.datastores if each.name.startswith(incomplete))


def _id(option: str, text: str, named: Callable[[str], int]) -> int:
    if text.isascii() and text.isdecimal() and int(text) < NO_ID:
        return int(text)
    try:
        return named(text)
    except (KeyError, ValueError):
        raise typer.BadParameter(f"{option} must be a name of this machine or a number, not {text!r}") from None


def _umask(text: str) -> int:
    try:
        return parse_umask(text)
    except ValueError as error:
        raise typer.BadParameter(f"--umask {error}") from error


def _memory_bytes(text: str) -> int:
    try:
        size_bytes = parse_quantity(text)
    except ValueError as error:
        raise typer.BadParameter(f"--memory {error}") from error
    if size_bytes < LEAST_MEMORY_BYTES:
        raise typer.BadParameter(f"--memory must be at least {format_quantity(LEAST_MEMORY_BYTES)}, not {text}")
    return size_bytes
