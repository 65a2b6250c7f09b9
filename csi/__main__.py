"""`python -m datastore.csi`: the node plugin. Environment: see settings.py; PROVISIONER names a module:function that
returns a Provisioner, and turns on the controller service.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from datastore import logs
from datastore.errors import InvalidManifest
from datastore.kubeclient import in_cluster

from .cluster import Cluster
from .controller import Controller, Provisioner
from .plugin import Plugin
from .settings import from_environment


def _controller(name: str) -> Controller | None:
    """Return the controller service, or None. The provisioner is loaded by name, as its package depends on this one."""
    if not name:
        return None
    module, _, function = name.partition(":")
    provisioner: Provisioner = getattr(importlib.import_module(module), function)()
    return Controller(provisioner)


def _version() -> str:
    try:
        return version("kube-datastore")
    except PackageNotFoundError:
        return "checkout"


def main() -> int:
    """Run the node plugin; return its exit code."""
    logs.setup()
    settings = from_environment(os.environ)
    if not settings.node_id:
        raise InvalidManifest("NODE_NAME is not set; the DaemonSet gives it from spec.nodeName")
    client = in_cluster(os.environ)
    cluster = Cluster(client) if client else None
    plugin = Plugin(settings, _version(), cluster, _controller(os.environ.get("PROVISIONER", "")))
    asyncio.run(plugin.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
