"""`python -m datastore.controller.servings`: the process of the controller of Servings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from datastore.controller.runtime import process
from datastore.controller.servings.kind import ServingKind
from datastore.controller.servings.settings import Settings

LEASE = "datastore-servings"
_DEFAULTS = Settings()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    parser = process.arguments("datastore.controller.servings", "Servings", _DEFAULTS)
    parser.add_argument(
        "--verify-image", default="", help="image in which pods verify their version; left out: the controller's own"
    )
    given = parser.parse_args(argv)
    settings = Settings(**process.runtime_settings(given, _DEFAULTS), verify_image=given.verify_image)
    process.run(settings, LEASE, partial(ServingKind, settings), verbose=given.verbose)


if __name__ == "__main__":
    main()
