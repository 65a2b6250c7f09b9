"""`python -m datastore.controller.trainingjobs`: the process of the controller of TrainingJobs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from datastore.controller.runtime import process
from datastore.controller.trainingjobs.kind import TrainingJobKind
from datastore.controller.trainingjobs.overlay import OVERLAYS
from datastore.controller.trainingjobs.settings import Settings

NAME = "datastore-training-controller"
"""The name of the controller's Lease, ServiceAccount and Deployment."""
_DEFAULTS = Settings(identity=NAME)


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    given = arguments().parse_args(argv)
    settings = settings_of(given)
    process.run(settings, NAME, partial(TrainingJobKind, settings), verbose=given.verbose)


def arguments() -> argparse.ArgumentParser:
    parser = process.arguments("datastore.controller.trainingjobs", "TrainingJobs", _DEFAULTS)
    parser.add_argument(
        "--allow-overlay",
        action="append",
        default=[],
        choices=OVERLAYS,
        help="what users may put into the templates of their pods; repeatable; none: who may create TrainingJobs may "
        "run plain pods only",
    )
    return parser


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings from the command line and the environment."""
    return Settings(
        **process.runtime_settings(given, _DEFAULTS),
        overlays=frozenset(given.allow_overlay),
        saves_models=os.environ.get("SAVE_MODELS", "").lower() == "true",
    )


if __name__ == "__main__":
    main()
