"""`python -m tests.cluster up|down|enter|load`: a test cluster from the shell (make cluster-up, make cluster-down)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.cluster.cluster import Cluster, ClusterError, down, find, join, up
from tests.cluster.layout import DEFAULT_NAME


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster; several may run (default: %(default)s)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    starting = verbs.add_parser("up", help="start a fresh cluster and wait until it is ready")
    starting.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    starting.add_argument("--api-only", action="store_true", help="no node: etcd, API server, controller manager")
    verbs.add_parser("down", help="end it and remove what it wrote")
    entering = verbs.add_parser("enter", help="run a command in its namespaces")
    entering.add_argument("command", nargs=argparse.REMAINDER, help="default: a shell")
    entering.add_argument("--node", type=int, choices=(1, 2), default=1, help="which (default: %(default)s)")
    loading = verbs.add_parser("load", help="give its nodes images")
    loading.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    return parser


def running(name: str, node: int = 1) -> Cluster:
    cluster = find(name, node)
    if cluster is None:
        raise ClusterError(f"no cluster {name} with node {node} is up; make cluster-up starts one")
    return cluster


def start(name: str, *, nodes: int, api_only: bool) -> None:
    cluster = find(name)
    if cluster is None:
        begun = time.monotonic()
        cluster = up(name, api_only=api_only)
        print(f"cluster {name}: ready after {time.monotonic() - begun:.1f} s")
    else:
        print(f"cluster {name} is up already")
    if nodes == 2 and not find(name, 2):
        begun = time.monotonic()
        join(cluster)
        print(f"cluster {name}: its second node joined after {time.monotonic() - begun:.1f} s")
    print(f"  export KUBECONFIG={cluster.kubeconfig}")
    print(f"  tests/cluster/enter --name {name} COMMAND   runs a command on the node (kubectl, ctr, mount, ...)")


def main(argv: list[str]) -> None:
    """Errors: ClusterError."""
    options = arguments().parse_args(argv)
    if options.verb == "up":
        start(options.name, nodes=options.nodes, api_only=options.api_only)
    elif options.verb == "down":
        down(options.name)
    elif options.verb == "load":
        for archive in options.archives:
            for node in filter(None, (running(options.name), find(options.name, 2))):
                node.load(archive)
    else:
        cluster = running(options.name, options.node)
        command = cluster.entering(*(options.command or ["bash"]))
        os.execvpe(command[0], command, cluster.environment())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ClusterError as error:
        sys.exit(f"cluster: {error}")
