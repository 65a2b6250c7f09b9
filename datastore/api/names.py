"""The names by which the controller, the command and the CSI driver know our objects in a cluster. Pure."""

from __future__ import annotations

GROUP = "datastore.dev"
"""Here and not with the models: the mount server knows these names, and must not load pydantic for them."""
MANAGER = "datastore-controller"
"""Field manager of every server-side apply, and reporter of our events."""
FINALIZER = f"{GROUP}/cleanup"
MANAGED_BY = "app.kubernetes.io/managed-by"
OWNER = f"{GROUP}/datastore"
"""Annotation of a PersistentVolume and its claim: `<namespace>/<name>` of the Datastore."""
UID = f"{GROUP}/uid"
"""Label of both: the Datastore's uid."""
NUDGED = f"{GROUP}/nudged"
"""Annotation of a claim: when we last changed it so that the cluster looks at it again (controller/decide.py)."""
CREDENTIALS = "csi.datastore.dev/credentials"
"""Annotation of a pod: version of the newest Secret that one of its volumes is mounted with. When it changes, the
kubelet publishes the pod's volumes again at once, with the keys as they are then."""
MARKER = ".datastore.owner"
"""Object below a Datastore's prefix that says for which Datastore the data was made; a mount does not show it."""
PODS_OF = "app.kubernetes.io/name=datastore,app.kubernetes.io/component="
"""Label selector of our own pods, before the component: controller, keeper or node, as manifests/base has them."""


def volume_name(uid: str) -> str:
    """Name of the PersistentVolume of the Datastore with this uid."""
    return f"datastore-{uid}"
