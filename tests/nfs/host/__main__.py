"""`python -m tests.nfs.host up|down|ssh ROLE [COMMAND ...]`: the guests, for people."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from tests.nfs.host.bed import Bed
from tests.servers import ServerMissing

DIRECTORY = Path(tempfile.gettempdir(), f"datastore-nfs-{os.getuid()}")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.nfs.host", description=__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("up").add_argument("--server-only", action="store_true")
    verbs.add_parser("down")
    ssh = verbs.add_parser("ssh")
    ssh.add_argument("role", choices=("server", "client"))
    ssh.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    bed = Bed(options.directory)
    if options.verb == "down":
        bed.down()
        return 0
    if options.verb == "ssh":
        guest = bed.server if options.role == "server" else bed.client
        command = [*guest.ssh_command(), *options.command]
        os.execvp(command[0], command)
    if (options.directory / "network").exists():
        parser.error(f"{options.directory} has one already: python -m tests.nfs.host down")
    try:
        bed.up(client=not options.server_only)
    except ServerMissing as error:
        parser.error(str(error))
    print(f"the NFS host is {bed.server.address} in the network namespace {bed.network.name}; for example:")
    print(f"  {' '.join(bed.network.command('bash'))}")
    print("  python -m tests.nfs.host ssh server exportfs -v")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
