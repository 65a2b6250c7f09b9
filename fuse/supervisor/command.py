"""The supervisor's process: reads a mount specification, makes the mount, reports that, and keeps the mount.

    python -m datastore.fuse [--builder module:function] [--guard FD] [--down-limit SECONDS] [--ends-with-parent]
        < mount specification

It writes one JSON line to standard output: {"ready": true, ...}, or {"error": line, "kind": class} when nothing was
mounted. A guard sends the specification over its channel instead, and gets the result there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from datastore import logs, ourprocess
from datastore.api.mountspec import from_json
from datastore.errors import DatastoreError, InvalidManifest, MountFailed

from .guard import Guard
from .process import DOWN_LIMIT_S, ENDING, EXIT_ERROR, UPGRADE, Supervisor
from .serverprocess import BUILDERS, ServerProcess

MAX_SPEC_BYTES = 8 << 20


def _say(line: dict[str, object]) -> None:
    """Write the line to standard output. Errors: OSError when nobody reads it any more."""
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def run(
    builder: str, guard: Guard | None, down_limit_s: float, first: ServerProcess | None, parent_pid: int = 0
) -> int:
    """Make the mount, keep it, and return the exit code. parent_pid: see Supervisor."""
    held = None
    try:
        text, held = guard.asked() if guard else (sys.stdin.read(MAX_SPEC_BYTES), None)
        if not text:  # the process that started us wants no mount after all
            return EXIT_ERROR
        spec = from_json(text)
        if not builder and spec.source.kind not in (*BUILDERS, "glusterfs"):
            raise InvalidManifest(f"a mount server can't show {spec.source}: it shows {', '.join(BUILDERS)}, glusterfs")
        if not builder and spec.source.kind == "glusterfs":
            from .glusterfs import GlusterSupervisor  # imported here to keep other supervisors small

            supervisor: Supervisor = GlusterSupervisor(spec, guard, first)
        else:
            supervisor = Supervisor(spec, builder or BUILDERS[spec.source.kind], guard, down_limit_s, first)
        supervisor.parent_pid = parent_pid
        if held is not None:
            supervisor.adopt(held)
        else:
            supervisor.open()
    except DatastoreError as error:
        told: dict[str, object] = {"error": str(error), "kind": type(error).__name__}
        with suppress(OSError, MountFailed):
            guard.tell(told) if guard else _say(told)
        return EXIT_ERROR
    try:
        if guard is not None:
            descriptors = () if held else (supervisor.device_fd, supervisor.opens_fd)
            guard.tell({"mounted": supervisor.negotiated}, descriptors)
        else:
            _say(supervisor.report())
    except (OSError, MountFailed):  # the process that asked for the mount is gone
        if held is None:  # nobody would ever unmount a new mount; the guard's host still holds one that was adopted
            supervisor.close()
        return EXIT_ERROR
    # Nothing is left of the terminal and of the process that started us: our output goes to the log.
    with open(os.devnull, "rb") as null, open(supervisor.log_path, "ab") as file:
        for ours, theirs in ((null, 0), (file, 1), (file, 2)):
            os.dup2(ours.fileno(), theirs)
    os.chdir("/")
    return supervisor.keep()


def main(arguments: list[str], first: ServerProcess | None = None) -> NoReturn:
    """Run the command line. first: a server that was started before this module was imported; it ends when we do."""
    parser = argparse.ArgumentParser(prog="python -m datastore.fuse")
    parser.add_argument("--builder", default="", help="module:function (default: by the kind of the mount's source)")
    parser.add_argument("--guard", type=int, default=-1, help="descriptor of a channel; supervisor/guard.py")
    parser.add_argument(
        "--down-limit",
        type=float,
        default=DOWN_LIMIT_S,
        metavar="SECONDS",
        help="callers wait so long for a new server; then they get EIO until one serves (default: %(default)s)",
    )
    parser.add_argument("--ends-with-parent", action="store_true", help="end the mount when our parent dies")
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING | {signal.SIGCHLD, UPGRADE})
    parent_pid = os.getppid() if options.ends_with_parent else 0
    if parent_pid:
        ourprocess.end_with_parent()
    with suppress(OSError):  # already the leader of a session or a group
        os.setsid()
    os.umask(0o077)
    logs.setup()
    guard = Guard(options.guard) if options.guard >= 0 else None
    sys.exit(run(options.builder, guard, options.down_limit, first, parent_pid))
