"""The node plugin's metrics in the text format of Prometheus."""

from __future__ import annotations

from . import mountinfo
from .volumes import Volumes


def rendered(volumes: Volumes) -> str:
    """Asks the mount table and what is held; no mount and no server."""
    table = mountinfo.read()
    lines = [
        "# HELP datastore_csi_volume_mounted Whether a volume of this node is mounted (1) or was lost (0).",
        "# TYPE datastore_csi_volume_mounted gauge",
    ]
    for volume_id in sorted(volumes.holdings.volumes()):
        held = volumes.holdings.get(volume_id)
        there = table.at(held.spec.mountpoint) if held else None
        up = int(there is not None and there.fstype == mountinfo.FSTYPE)
        lines.append(f'datastore_csi_volume_mounted{{volume="{_escaped(volume_id)}"}} {up}')
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
