"""The node plugin's own metrics; those of the mounts are the keeper's host's (keeper/metrics.py)."""

from __future__ import annotations

from datastore import mountinfo

from .textformat import Family, rendered
from .volumes import Volumes

MOUNTED = Family("datastore_csi_volume_mounted", "gauge", "Whether a volume of this node is mounted (1) or lost (0).")


def of_volumes(volumes: Volumes) -> str:
    """Asks the mount table and what is held; no mount and no server."""
    table = mountinfo.read()
    samples = []
    for volume_id in sorted(volumes.holdings.volumes()):
        held = volumes.holdings.get(volume_id)
        there = table.at(held.spec.mountpoint) if held else None
        mounted = there is not None and there.fstype == mountinfo.FSTYPE
        samples.append((MOUNTED.name, {"volume": volume_id}, float(mounted)))
    return rendered([MOUNTED], samples)
