"""`python -m datastore.controller`: settings from the command line and the environment, then run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from datastore import logs
from datastore.api import endpoints
from datastore.controller.operator import Operator
from datastore.controller.settings import Settings
from datastore.units import parse_duration

_DEFAULTS = Settings()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    given = _arguments().parse_args(argv)
    logs.setup(logging.DEBUG if given.verbose else logging.INFO)
    # kopf tells every event of every object at INFO and DEBUG.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(_run(_settings(given)))


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Operator(settings).run(stop)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datastore.controller", description="The Datastore controller.")
    add = parser.add_argument
    add(
        "--namespace",
        action="append",
        default=[],
        dest="namespaces",
        help="serve only this one and its own; repeatable (also: NAMESPACES=a,b)",
    )
    add("--peering", default="", help="name of the ClusterKopfPeering that the replicas share")
    add("--priority", type=int, help="of this replica; left out: by its identity, so that each has another")
    add("--workers", type=int, default=_DEFAULTS.workers, help="Datastores worked on at once")
    add("--check", type=parse_duration, default=_DEFAULTS.check_s, help="how often a working backend is looked at")
    add("--heartbeat", type=parse_duration, default=_DEFAULTS.heartbeat_s, help="how often the watch is tried")
    add("--allow-local", action="append", default=[], metavar="DIR", help="a directory spec.local may name; repeatable")
    add("--ambient-credentials", action="store_true", help="lend our identity to Datastores without a Secret")
    add(
        "--watch-secrets",
        action="store_true",
        default=os.environ.get("WATCH_SECRETS") == "true",
        help="see changes of Secrets at once and tell the pods that use them (also: WATCH_SECRETS=true)",
    )
    add(
        "--allow-endpoint",
        action="append",
        default=[],
        metavar="PATTERN",
        help="an endpoint that users may name, e.g. https://*.example.org; repeatable; none: all but link-local ones"
        f" (also: {endpoints.ENVIRONMENT}=a,b, which the node plugin reads as well)",
    )
    add(
        "--probe-claims",
        action="store_true",
        default=os.environ.get("PROBE_CLAIMS") == "true",
        help="make pods that try a claim's volume, where spec.claim.probe asks (also: PROBE_CLAIMS=true)",
    )
    add("--probe-image", default="", help="their image; left out: the controller's own")
    add("--port", type=int, default=_DEFAULTS.port, help="of /livez, /readyz and /metrics")
    add("--verbose", action="store_true", help="log every step")
    return parser


def _settings(given: argparse.Namespace) -> Settings:
    identity = os.environ.get("POD_NAME") or f"{_DEFAULTS.identity}-{os.getpid()}"
    namespaces = tuple(given.namespaces) or tuple(os.environ.get("NAMESPACES", "").replace(",", " ").split())
    return Settings(
        namespaces=namespaces,
        namespace=os.environ.get("POD_NAMESPACE") or _DEFAULTS.namespace,
        identity=identity,
        # kopf's peerings of single namespaces would be one more object in each: there one replica works.
        peering="" if namespaces else given.peering,
        priority=_priority(identity) if given.priority is None else given.priority,
        workers=given.workers,
        check_s=given.check,
        heartbeat_s=given.heartbeat,
        local_paths=frozenset(given.allow_local),
        ambient_credentials=given.ambient_credentials,
        watch_secrets=given.watch_secrets,
        endpoints=(*given.allow_endpoint, *endpoints.listed(os.environ.get(endpoints.ENVIRONMENT, ""))),
        probe_claims=given.probe_claims,
        probe_image=given.probe_image,
        port=given.port,
    )


def _priority(identity: str) -> int:
    """kopf pauses all peers of one priority, so each replica has another: from its name."""
    return int.from_bytes(identity.encode()[-6:], "big") % 1_000_000


if __name__ == "__main__":
    main()
