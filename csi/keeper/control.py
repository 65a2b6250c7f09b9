"""Asking a mount server over its control socket; one that is gone, hangs or speaks otherwise is a KeeperAway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datastore import controlclient
from datastore.api.mountspec import MountSpec, reveal
from datastore.controlclient import Answer, NotAnswering

from ..errors import KeeperAway

__all__ = ["Answer", "ask", "renewal"]


def renewal(spec: MountSpec) -> dict[str, Any]:
    """The request that gives a server the keys of a specification; never to be logged."""
    keys = spec.s3.credentials
    shown = None if keys is None else json.loads(json.dumps(asdict(keys), default=reveal))
    return {"op": "credentials", "keys": shown}


def ask(state_dir: Path, request: Mapping[str, Any], timeout_s: float) -> Answer:
    """The answer. Errors: KeeperAway."""
    try:
        return controlclient.ask(state_dir, request, timeout_s)
    except NotAnswering as error:
        raise KeeperAway(str(error)) from None
