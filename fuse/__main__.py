"""`python -m datastore.fuse`: the keeper of one mount; with `--server FD`, the server that the keeper starts.

Each imports only what it needs: the keeper stays small, because it lives as long as the mount.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Choose the process."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--server"]:
        from .server import main as serve

        serve(arguments[1:])
    else:
        from .keeper.command import main as keep

        keep(arguments)


if __name__ == "__main__":
    main()
