"""`python -m datastore.controller`: the controller of Datastores, with its command line and environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from datastore.api.endpoints import policy_from
from datastore.api.names import MANAGER
from datastore.controller.datastores.kind import DatastoreKind
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime import process
from datastore.units import parse_duration

_DEFAULTS = Settings()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    given = _arguments().parse_args(argv)
    settings = _settings(given)
    process.run(settings, MANAGER, partial(DatastoreKind, settings), verbose=given.verbose)


def _arguments() -> argparse.ArgumentParser:
    parser = process.arguments("datastore.controller", "Datastores", _DEFAULTS)
    add = parser.add_argument
    add("--check", type=parse_duration, default=_DEFAULTS.check_s, help="how often a storage that works is checked")
    add("--allow-local", action="append", default=[], metavar="DIR", help="a directory spec.local may name; repeatable")
    add("--ambient-credentials", action="store_true", help="let Datastores without a Secret use our identity")
    add(
        "--watch-secrets",
        action="store_true",
        default=os.environ.get("WATCH_SECRETS") == "true",
        help="watch Secrets, and annotate the pods that use a changed one (also: WATCH_SECRETS=true)",
    )
    add(
        "--allow-endpoint",
        action="append",
        default=[],
        metavar="PATTERN",
        help="an endpoint that users may name, e.g. https://*.example.org; repeatable; none: all"
        " (also: ALLOW_ENDPOINTS=a,b, which the node plugin reads as well)",
    )
    add(
        "--allow-range",
        action="append",
        default=[],
        metavar="RANGE",
        help="addresses that users' endpoints may lead to, e.g. 10.1.0.0/16; repeatable; none: no private ones"
        " (also: ALLOW_RANGES=a,b, which the node plugin reads as well)",
    )
    add(
        "--deny-range",
        action="append",
        default=[],
        metavar="RANGE",
        help="addresses that they may not lead to, e.g. those of pods and services; repeatable (also: DENY_RANGES=a,b)",
    )
    add(
        "--probe-claims",
        action="store_true",
        default=os.environ.get("PROBE_CLAIMS") == "true",
        help="create pods that probe a claim's volume, if spec.claim.probe is set (also: PROBE_CLAIMS=true)",
    )
    add("--probe-image", default="", help="their image; left out: the controller's own")
    return parser


def _settings(given: argparse.Namespace) -> Settings:
    return Settings(
        **process.runtime_settings(given, _DEFAULTS),
        check_s=given.check,
        local_paths=frozenset(given.allow_local),
        ambient_credentials=given.ambient_credentials,
        watch_secrets=given.watch_secrets,
        policy=policy_from(os.environ, given.allow_endpoint, given.allow_range, given.deny_range),
        probe_claims=given.probe_claims,
        probe_image=given.probe_image,
    )


if __name__ == "__main__":
    main()
