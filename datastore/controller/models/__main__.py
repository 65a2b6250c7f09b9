"""`python -m datastore.controller.models`: the process of the controller of Models, ModelVersions and ModelExports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from datastore.controller.models.kind import ModelKind, Settings
from datastore.controller.models.volume import MANAGER
from datastore.controller.runtime import process

_DEFAULTS = Settings()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    parser = process.arguments("datastore.controller.models", "ModelVersions", _DEFAULTS)
    parser.add_argument("--job-image", default="", help="of the Jobs; left out: the controller's own")
    given = parser.parse_args(argv)
    settings = Settings(**process.runtime_settings(given, _DEFAULTS), job_image=given.job_image)
    process.run(settings, MANAGER, partial(ModelKind, settings), verbose=given.verbose)


if __name__ == "__main__":
    main()
