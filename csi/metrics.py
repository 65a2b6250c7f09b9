"""The metrics of the node plugin and of the kernel's mounts; the mount daemon has those of our engine's mounts."""

from __future__ import annotations

from datastore import mountinfo
from datastore.nfsclient import FSTYPES

from .mountdaemon.metrics import FAMILIES as OF_MOUNTS
from .textformat import Family, Sample, rendered
from .volumes import Volumes

MOUNTED = Family("datastore_csi_volume_mounted", "gauge", "Whether a volume of this node is mounted (1) or lost (0).")
TRANSPORT = Family("datastore_csi_volume_transport", "gauge", "How a volume is mounted: by our engine or the kernel.")
LEFT = Family(
    "datastore_csi_left_files",
    "gauge",
    "Files of a volume that has left this node that are not uploaded; they are sent when it is mounted here again.",
)
STUCK = Family(
    "datastore_csi_stuck_processes",
    "gauge",
    "Commands that hang in the kernel and can't be ended.",
)
FAMILIES = (MOUNTED, TRANSPORT, LEFT, STUCK)


def of_volumes(volumes: Volumes) -> str:
    """Return the page for a scrape. It asks the mount table and the NFS servers, and never touches a mount."""
    table = mountinfo.read()
    samples: list[Sample] = [(STUCK.name, {}, float(volumes.commands.left_behind()))]
    samples += [(LEFT.name, {"volume": name}, float(count)) for name, count in volumes.left_files().items()]
    for volume in sorted(volumes.mounted(), key=lambda each: each.volume_id):
        there = table.at(volume.spec.mountpoint)
        mounted = there is not None and there.fstype in (*mountinfo.SUPERVISED, *FSTYPES)
        samples.append((MOUNTED.name, {"volume": volume.volume_id}, float(mounted)))
        if there is not None and mounted:
            transport = "kernel" if there.fstype in FSTYPES else "engine"
            samples.append((TRANSPORT.name, {"volume": volume.volume_id, "transport": transport}, 1.0))
    return rendered([*FAMILIES, *OF_MOUNTS], [*samples, *volumes.kernel.metrics()])
