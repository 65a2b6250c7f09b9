"""Objects for the tests of the node plugin: the driver itself, a volume with its claim and Secret, pods that use it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.fixtures import Site, Storage
from tests.cluster.kube import Manifest

DRIVER = "csi.datastore.dev"
SYSTEM = "datastore-system"
KUBELET = "/var/lib/kubelet"
NODE, KEEPER = "datastore-node", "datastore-keeper"


def driver(site: Site) -> list[Manifest]:
    """Namespace, CSIDriver, RBAC, and the two DaemonSets."""
    keeper = _daemon(site, KEEPER, ["datastore.csi.keeper"], [{"name": "HTTP_PORT", "value": "9809"}], 9809)
    keeper["spec"]["updateStrategy"] = {"type": "OnDelete"}
    keeper["spec"]["template"]["spec"]["automountServiceAccountToken"] = False
    node = _daemon(
        site,
        NODE,
        ["datastore.csi"],
        [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "REGISTRY_DIR", "value": f"{KUBELET}/plugins_registry"},
            {"name": "HTTP_PORT", "value": "9808"},
        ],
        9808,
    )
    node["spec"]["template"]["spec"]["serviceAccountName"] = NODE
    return [_named("v1", "Namespace", SYSTEM), csi_driver(), *_rights(), keeper, node]


def csi_driver() -> Manifest:
    return {
        **_named("storage.k8s.io/v1", "CSIDriver", DRIVER),
        "spec": {
            "attachRequired": False,
            "podInfoOnMount": True,
            "fsGroupPolicy": "File",
            "requiresRepublish": True,
            "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        },
    }


def _rights() -> list[Manifest]:
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get"]},
        {"apiGroups": ["datastore.dev"], "resources": ["datastores"], "verbs": ["get"]},
    ]
    rbac = "rbac.authorization.k8s.io"
    return [
        {**_named("v1", "ServiceAccount", NODE), "metadata": {"name": NODE, "namespace": SYSTEM}},
        {**_named(f"{rbac}/v1", "ClusterRole", NODE), "rules": rules},
        {
            **_named(f"{rbac}/v1", "ClusterRoleBinding", NODE),
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": NODE},
            "subjects": [{"kind": "ServiceAccount", "name": NODE, "namespace": SYSTEM}],
        },
    ]


def _named(api: str, kind: str, name: str) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}}


def _daemon(site: Site, name: str, module: list[str], env: list[Manifest], port: int) -> Manifest:
    container: Manifest = {
        **site.container("python3", "-m", *module),
        "env": env,
        "securityContext": {"privileged": True, "runAsUser": 0},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": port}, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": port}, "periodSeconds": 2},
        "volumeMounts": [{"name": "kubelet", "mountPath": KUBELET, "mountPropagation": "Bidirectional"}],
    }
    labels = {"app.kubernetes.io/name": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": SYSTEM},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "priorityClassName": "system-node-critical",
                    "tolerations": [{"operator": "Exists"}],
                    "terminationGracePeriodSeconds": 30,
                    "containers": [container],
                    "volumes": [{"name": "kubelet", "hostPath": {"path": KUBELET, "type": "Directory"}}],
                },
            },
        },
    }


@dataclass
class Volume:
    """A bucket as a claim `data` of a namespace, as the controller would make it."""

    site: Site
    storage: Storage
    namespace: str
    bucket: str
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        here = self.storage.here
        self.keys = self.keys or {"AWS_ACCESS_KEY_ID": here.access_key, "AWS_SECRET_ACCESS_KEY": here.secret_key}

    @property
    def spec(self) -> dict[str, Any]:
        return {"s3": {"bucket": self.bucket, "endpoint": self.storage.endpoint}}

    @property
    def handle(self) -> str:
        return f"{self.namespace}/data/0001"

    def secret(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys", "namespace": self.namespace},
            "stringData": self.keys,
        }

    def objects(self, modes: tuple[str, ...] = ("ReadWriteMany",)) -> list[Manifest]:
        name = f"datastore-{self.namespace}"
        reference = {"name": "keys", "namespace": self.namespace}
        volume = {
            **_named("v1", "PersistentVolume", name),
            "spec": {
                "capacity": {"storage": "1Ti"},
                "accessModes": list(modes),
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"name": "data", "namespace": self.namespace},
                "csi": {
                    "driver": DRIVER,
                    "volumeHandle": self.handle,
                    "volumeAttributes": {"datastore.dev/spec": json.dumps(self.spec)},
                    "nodeStageSecretRef": reference,
                    "nodePublishSecretRef": reference,
                },
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": self.namespace},
            "spec": {
                "accessModes": list(modes),
                "storageClassName": "",
                "volumeName": name,
                "resources": {"requests": {"storage": "1Ti"}},
            },
        }
        return [self.secret(), volume, claim]

    def pod(
        self, name: str, script: str, *, mount: Manifest | None = None, volume: Manifest | None = None, **spec: Any
    ) -> Manifest:
        """A pod that runs a Python script with the claim at /data."""
        container = self.site.container("python3", "-u", "-c", script)
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data", **(mount or {})}]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 2,
                # The image's user is nobody in particular; a fresh bucket's directory is root's.
                "securityContext": {"runAsUser": 0},
                "containers": [container],
                "volumes": [{"name": "data", **(volume or {"persistentVolumeClaim": {"claimName": "data"}})}],
                **spec,
            },
        }
