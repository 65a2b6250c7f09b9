"""How a pod requests something of the node plugin: by a downwardAPI volume with a certain name.

The kubelet writes such a volume's files below the pod's directory, in `pods` (Settings.pods_dir), where no container
can change them. A request needs neither the API server nor a process in the pod.
"""

from __future__ import annotations

import os
from pathlib import Path


def requests(pods: Path, volume: str) -> dict[str, Path]:
    """Return the directory of the volume with this name in each pod that has one, by the pod's uid."""
    return {path.parents[2].name: path for path in pods.glob(f"*/volumes/*downward-api/{volume}")}


def uid_of(pods: Path, target: str) -> str:
    """Return the uid of the pod whose volume is published at this path; '..' for a path outside of `pods`."""
    return os.path.relpath(target, pods).split(os.sep)[0]
