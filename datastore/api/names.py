"""The names by which the controller, the command and the CSI driver know our objects in a cluster. Pure."""

from __future__ import annotations

GROUP = "datastore.dev"
"""Here and not with the models: the mount server knows these names, and must not load pydantic for them."""
DEFAULT_STORE = "models"
"""The Datastore of a namespace that holds models, unless a Model names another one."""
MANAGER = "datastore-controller"
"""Field manager of every server-side apply, and reporter of our events."""
FINALIZER = f"{GROUP}/cleanup"
MANAGED_BY = "app.kubernetes.io/managed-by"
OWNER = f"{GROUP}/datastore"
"""Annotation of a PersistentVolume and its claim: `<namespace>/<name>` of the Datastore."""
UID = f"{GROUP}/uid"
"""Label of both: the Datastore's uid."""
APPLIED = f"{GROUP}/applied"
"""Annotation of an object of an NFS server: a hash of what was applied last."""
ARCHIVED = f"{GROUP}/archived"
"""Label of a claim that outlives its Datastore by `reclaimPolicy: Archive`: "true"."""
NUDGED = f"{GROUP}/nudged"
"""Annotation of a claim: when we last changed it so that the cluster looks at it again (controller/decide.py)."""
CREDENTIALS = "csi.datastore.dev/credentials"
"""Annotation of a pod: version of the newest Secret that one of its volumes is mounted with. When it changes, the
kubelet publishes the pod's volumes again at once, with the keys as they are then."""
LOGS_VOLUME = "datastore-logs"
"""Volume of a pod (downwardAPI) that asks the node plugin to write the pod's log into a Datastore that it has mounted
(csi/podlogs.py). Its files: wanted ({"datastore", "path"}), index, pod, namespace."""
USAGE_VOLUME = "datastore-usage"
"""Volume of a pod (downwardAPI) that asks the node plugin to measure what the pod uses (csi/podusage.py)."""
DEFAULT_NFS_CLASS = f"{GROUP}/is-default-nfs-class"
"""Annotation of a StorageClass: "true" makes it the one of Datastores with `nfs: {}`."""
MARKER = ".datastore.owner"
"""Object below a Datastore's prefix that says for which Datastore the data was made; a mount does not show it."""
PODS_OF = "app.kubernetes.io/name=datastore,app.kubernetes.io/component="
"""Label selector of our own pods, before the component (controller, mount-daemon, node), as in manifests/base."""


SERVING = f"{GROUP}/serving"
"""Label of what a Serving has made: its name."""
MODEL = f"{GROUP}/model"
MODEL_VERSION = f"{GROUP}/version"
"""Labels of a Serving's pods: which model, and which version of it they have mounted."""


def usage_name(node: str) -> str:
    """The ConfigMap, in our own namespace, with what the pods of a node use: by their uids (csi/podusage.py)."""
    return f"datastore-usage-{node}"


def volume_name(uid: str) -> str:
    """Name of the PersistentVolume of the Datastore with this uid."""
    return f"datastore-{uid}"
