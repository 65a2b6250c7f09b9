"""`python -m datastore.fuse`: the supervisor of one mount; with `--server FD`, the server that the supervisor starts.

Each process imports only what it needs. The supervisor stays small, because it lives as long as the mount.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Become the supervisor or the server, as the command line says."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--server"]:
        from .server import main as serve

        serve(arguments[1:])
    else:
        from .supervisor.serverprocess import first

        # Not with --guard: the guard says at once what to mount, and puts us into a cgroup before we start a process.
        server = first(arguments) if "--guard" not in arguments else None
        from .supervisor.command import main as keep

        keep(arguments, server)


if __name__ == "__main__":
    main()
