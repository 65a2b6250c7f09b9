"""Names of objects, labels and annotations that the controller, the command and the CSI driver share. Pure."""

from __future__ import annotations

GROUP = "datastore.dev"
"""The API group; here and not with the models, so that the mount server can use these names without pydantic."""
DEFAULT_STORE = "models"
"""The Datastore of a namespace that holds models, unless a Model names another one."""
MANAGER = "datastore-controller"
"""Field manager of every server-side apply, and reporting component of our events."""
FINALIZER = f"{GROUP}/cleanup"
MANAGED_BY = "app.kubernetes.io/managed-by"
OWNER = f"{GROUP}/datastore"
"""Annotation of the objects of a Datastore, such as its PersistentVolume and claim: `<namespace>/<name>`."""
UID = f"{GROUP}/uid"
"""Label of the same objects: the Datastore's uid."""
APPLIED = f"{GROUP}/applied"
"""Annotation of an object that was made for a Serving or as an NFS server: a digest of what was applied last. It also
changes when a field is no longer wanted."""
ADDRESS = f"{GROUP}/address"
"""Annotation of the claim of such a server: the address of its Service, which volumes name for good."""
ARCHIVED = f"{GROUP}/archived"
"""Label of a claim that stays when its Datastore with `reclaimPolicy: Archive` is deleted: "true"."""
PROBE = f"{GROUP}/probe"
"""Label of a pod that tries a volume of another driver: "true". manifests/claim-probe knows the pod by it."""
NUDGED = f"{GROUP}/nudged"
"""Annotation of a claim: when the controller last touched the claim so that Kubernetes tries to bind it again."""
CREDENTIALS = "csi.datastore.dev/credentials"
"""Annotation of a pod: the version of the newest Secret with which one of its volumes is mounted. When the annotation
changes, the kubelet publishes the pod's volumes again at once, with the present keys."""
LOGS_VOLUME = "datastore-logs"
"""The downwardAPI volume by which a pod requests that the node plugin writes the pod's log into a Datastore that the
pod has mounted (csi/podlogs.py). The volume's files: wanted ({"datastore", "path"}), index, pod, namespace."""
USAGE_VOLUME = "datastore-usage"
"""The downwardAPI volume by which a pod requests that the node plugin measures what it uses (csi/podusage.py)."""
DEFAULT_NFS_CLASS = f"{GROUP}/is-default-nfs-class"
"""Annotation of a StorageClass: "true" makes the class the default one of Datastores with `nfs: {}`."""
MARKER = ".datastore.owner"
"""The marker: the object below a prefix that says for which Datastore the data was made. A mount does not show it."""
PODS_OF = "app.kubernetes.io/name=datastore,app.kubernetes.io/component="
"""Label selector of our own pods (manifests/base), to which a component is added: controller, mount-daemon, node."""


SERVING = f"{GROUP}/serving"
"""Label of the objects that were made for a Serving: the name of the Serving."""
MODEL = f"{GROUP}/model"
MODEL_VERSION = f"{GROUP}/version"
"""Labels of a Serving's pods: which model, and which version of it they have mounted."""


def usage_name(node: str) -> str:
    """Return the name of the ConfigMap, in our own namespace, with a node's usage by pod uid (csi/podusage.py)."""
    return f"datastore-usage-{node}"


def volume_name(uid: str) -> str:
    """Return the name of the PersistentVolume of the Datastore with this uid."""
    return f"datastore-{uid}"
