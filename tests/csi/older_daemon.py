"""The mount daemon of an earlier release, whose MountSpec had no group."""

from __future__ import annotations

import json
import sys

from datastore.api.mountspec import MountSpec, from_json
from datastore.csi.mountdaemon import protocol
from datastore.csi.mountdaemon.__main__ import main
from datastore.errors import InvalidManifest


def earlier(text: str) -> MountSpec:
    """Parse a MountSpec as that release did."""
    if "group" in json.loads(text):
        why = "MountSpec.__init__() got an unexpected keyword argument 'group'"
        raise InvalidManifest(f"not a mount specification: {why}")
    return from_json(text)


if __name__ == "__main__":
    vars(protocol)["from_json"] = earlier
    sys.exit(main())
