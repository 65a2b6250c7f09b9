"""Makes an export for each Datastore by a small NFS-Ganesha server in the cluster: `provisioner: ganesha`.

There are four objects in the administrator's namespace, with the Datastore's uid in name and label: a claim of the
StorageClass that the class names (it holds the data, and its size is the quota), a StatefulSet of one pod that serves
the data, a Service whose address stays when the pod moves, and a NetworkPolicy that lets in the clients. The pod's
program is ganeshapod.py. From a user the objects have only the claim's size, and the Datastore's name in an annotation.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datastore.api.names import ADDRESS, ARCHIVED, MANAGED_BY, MANAGER, OWNER, UID, volume_name
from datastore.api.objects import CONFINED
from datastore.api.resources import CLAIMS, NETWORK_POLICIES, SERVICES, STATEFULSETS
from datastore.api.source import NFSLocation
from datastore.api.status import Capabilities
from datastore.backends.base import Cluster, Ensured, Identity, Measured, Owner, Policy, Released
from datastore.backends.nfs import ganeshapod
from datastore.backends.nfs.parameters import NOBODY, GaneshaParameters, limit
from datastore.errors import NotFound, ServerStarting
from datastore.units import format_quantity, parse_quantity

Raw = Mapping[str, Any]

POLL_S = 0.5
LEASE_S, GRACE_S = 20, 30
"""For version 4. After a restart new opens wait until the grace period ends or all clients have come back."""
RESERVED_FSID = 152
"""152.152 is the file system id of Ganesha's own root."""
_SQUASH = {"none": "No_Root_Squash", "root": "Root_Squash", "all": "All_Squash"}
MOUNT_DAEMON = {"app.kubernetes.io/name": "datastore", "app.kubernetes.io/component": "mount-daemon"}
"""Labels of the pods that mount on nodes whose kernel has no NFS client; they have addresses of their own."""
CAPABILITIES = (
    # The server does each request as the client's user, which is root where root is not squashed.
    *("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "MKNOD"),
    # To open files by their handles, and to use the portmapper's port.
    *("DAC_READ_SEARCH", "NET_BIND_SERVICE"),
)


def configuration(uid: str, parameters: GaneshaParameters) -> str:
    """Return Ganesha's configuration: numbers, networks and fixed words, which can't end a line or a block. Pure."""
    export_id, fsid = numbers_of(uid)
    access = parameters.access
    anonymous, group, _ = access.owner if access.squash == "all" else (NOBODY, NOBODY, 0)
    rights = f"Squash = {_SQUASH[access.squash]}; Anonymous_Uid = {anonymous}; Anonymous_Gid = {group};"
    everybody, clients = "RW", ""
    if access.clients is not None:
        # For Ganesha the network of all addresses is `*` only. The probe comes from within the pod.
        everyone = any(each.endswith("/0") for each in access.clients)
        networks = "*" if everyone else ", ".join((*access.clients, "127.0.0.1"))
        everybody, clients = "None", f"CLIENT {{ Clients = {networks}; Access_Type = RW; {rights} }}"
    return f"""\
NFS_CORE_PARAM {{
    Protocols = 3, 4;
    NFS_Port = {ganeshapod.NFS_PORT};
    MNT_Port = {ganeshapod.MOUNT_PORT};
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
    mount_path_pseudo = true;
}}
MDCACHE {{ Entries_HWMark = 20000; }}
NFSV4 {{
    RecoveryBackend = fs;
    RecoveryRoot = {ganeshapod.VOLUME / ganeshapod.STATE};
    Lease_Lifetime = {LEASE_S};
    Grace_Period = {GRACE_S};
    Only_Numeric_Owners = true;
}}
EXPORT {{
    Export_Id = {export_id};
    Filesystem_Id = {fsid[0]}.{fsid[1]};
    Path = {ganeshapod.VOLUME / ganeshapod.DATA};
    Pseudo = {ganeshapod.PSEUDO};
    Protocols = 3, 4;
    Transports = TCP;
    SecType = sys;
    Access_Type = {everybody};
    {rights}
    {clients}
    FSAL {{ Name = VFS; }}
}}
"""


def numbers_of(uid: str) -> tuple[int, tuple[int, int]]:
    """Return the Export_Id (16 bits) and the Filesystem_Id of a Datastore, which are always the same. Pure."""
    digest = hashlib.sha256(uid.encode()).digest()
    export_id = int.from_bytes(digest[:2], "big") % 65534 + 1
    major, minor = (int.from_bytes(digest[at : at + 4], "big") | 1 << 16 for at in (2, 6))
    assert major != RESERVED_FSID, "it is larger"
    return export_id, (major, minor)


class GaneshaExport:
    """See Backend. capacity_bytes: of the Datastore, else of its StorageClass. nodes, made: see Opening."""

    def __init__(
        self,
        identity: Identity,
        parameters: GaneshaParameters,
        cluster: Cluster,
        nodes: Callable[[], Sequence[str]],
        *,
        capacity_bytes: int | None,
        made: bool,
    ) -> None:
        self._identity = identity
        self._parameters = parameters
        self._cluster = cluster
        self._nodes = nodes
        self._capacity_bytes = capacity_bytes
        self._made = made
        self._name = volume_name(identity.uid)

    def ensure(self) -> Ensured:
        """See Backend.

        Errors: InvalidManifest without a capacity; NotFound if the claim was made and is gone, or goes; ServerStarting
        until the export is served.
        """
        capacity_bytes = limit(self._capacity_bytes)
        space = self._parameters.namespace
        here = self._cluster.get(CLAIMS, space, self._name)
        if here is None and self._made:
            text = f"PersistentVolumeClaim {space}/{self._name}, which has the data, is gone, and is not made anew"
            raise NotFound(f"{text}: restore it, with its labels, on its PersistentVolume, or delete the Datastore")
        if here is not None and "deletionTimestamp" in here["metadata"]:
            volume = here["spec"].get("volumeName", "")
            text = f"PersistentVolumeClaim {space}/{self._name}, which has the data, was deleted and goes with its pod"
            keep = """-p '{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}'"""
            raise NotFound(f"{text}: keep the data by `kubectl patch pv {volume} {keep}`, then restore the claim")
        address = self._cluster.apply(self._service(here), self._identity.uid)["spec"]["clusterIP"]
        wanted = self._claim(here, capacity_bytes, annotations={ADDRESS: address})
        claim = self._cluster.apply(wanted, self._identity.uid)
        self._cluster.apply(self._policy(), self._identity.uid)
        served = self._cluster.apply(self._server(), self._identity.uid).get("status") or {}
        if not served.get("readyReplicas"):
            asked = f"pod {self._name}-0"
            if (claim.get("status") or {}).get("phase") != "Bound" and "volumeName" not in claim["spec"]:
                asked = f"pvc {self._name}"
            raise ServerStarting(f"the NFS server is not ready yet: kubectl -n {space} describe {asked}")
        source = NFSLocation(
            server=address,
            path=ganeshapod.PSEUDO,
            port=ganeshapod.NFS_PORT,
            mount_port=ganeshapod.MOUNT_PORT,
        )
        return Ensured(source=source, owner=Owner.THIS)

    def probe(self) -> Capabilities:
        """See Backend. Nothing is tried."""
        return Capabilities.model_validate({})

    def usage(self) -> Measured | None:
        """See Backend. Only a mount could count."""
        return None

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """See Backend. The server is always removed, the claim only with Delete. Archive puts a label on the claim."""
        space, uid = self._parameters.namespace, self._identity.uid
        claim = f"PersistentVolumeClaim {space}/{self._name}"
        kinds = (STATEFULSETS, SERVICES, NETWORK_POLICIES, *((CLAIMS,) if policy is Policy.DELETE else ()))
        left = [kind for kind in kinds if self._cluster.delete(kind, space, self._name, uid)]
        while left and go_on():
            time.sleep(POLL_S)
            left = [kind for kind in left if self._cluster.delete(kind, space, self._name, uid)]
        if left:
            return Released(done=False, message=f"waiting for {left[0].plural} {space}/{self._name} to go")
        if policy is Policy.DELETE:
            return Released(done=True, message=f"{claim} was removed, and its data as its StorageClass says")
        here = self._cluster.get(CLAIMS, space, self._name)
        if here is None:
            return Released(done=True, message=f"{claim} was not there any more")
        if policy is Policy.ARCHIVE:
            self._cluster.apply(self._claim(here, 0, labels={ARCHIVED: "true"}), uid)
        return Released(done=True, message=f"{claim} stays, and nothing serves it")

    def _metadata(self, labels: Raw | None = None, annotations: Raw | None = None) -> dict[str, Any]:
        return {
            "name": self._name,
            "namespace": self._parameters.namespace,
            "labels": {MANAGED_BY: MANAGER, UID: self._identity.uid, **(labels or {})},
            "annotations": {OWNER: f"{self._identity.namespace}/{self._identity.name}", **(annotations or {})},
        }

    def _claim(self, here: Raw | None, capacity_bytes: int, **more: Raw) -> dict[str, Any]:
        """Return the claim. here: the claim as it exists, which is not made smaller, since claims can't shrink."""
        asked = here["spec"]["resources"]["requests"]["storage"] if here else "0"
        size = format_quantity(max(capacity_bytes, parse_quantity(asked)))
        spec: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
        if here is not None:
            spec["storageClassName"] = here["spec"].get("storageClassName", "")
        else:
            spec["storageClassName"] = self._parameters.claim_class
        return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": self._metadata(**more), "spec": spec}

    def _service(self, claim: Raw | None) -> dict[str, Any]:
        """Return the Service, with the address that it had before somebody removed it. claim: as it exists."""
        address = (claim["metadata"].get("annotations") or {}).get(ADDRESS) if claim else None
        ports = (("nfs", ganeshapod.NFS_PORT), ("mountd", ganeshapod.MOUNT_PORT))
        spec = {
            "type": "ClusterIP",
            **({"clusterIP": address} if address else {}),
            "selector": {UID: self._identity.uid},
            "ports": [{"name": name, "protocol": "TCP", "port": port, "targetPort": port} for name, port in ports],
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(), "spec": spec}

    def _policy(self) -> dict[str, Any]:
        """Let only the clients and the nodes' mount daemons in, to two ports, and no connection of the server out."""
        daemons = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._cluster.namespace}},
            "podSelector": {"matchLabels": MOUNT_DAEMON},
        }
        networks = self._parameters.access.networks(self._nodes)
        clients = [daemons, *({"ipBlock": {"cidr": each}} for each in networks)]
        ports = [{"protocol": "TCP", "port": port} for port in (ganeshapod.NFS_PORT, ganeshapod.MOUNT_PORT)]
        spec = {
            "podSelector": {"matchLabels": {UID: self._identity.uid}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": clients, "ports": ports}],
        }
        body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
        return {**body, "metadata": self._metadata(), "spec": spec}

    def _server(self) -> dict[str, Any]:
        labels = {MANAGED_BY: MANAGER, UID: self._identity.uid}
        uid, gid, mode = self._parameters.access.owner
        environment = {
            ganeshapod.CONFIGURATION: configuration(self._identity.uid, self._parameters),
            ganeshapod.OWNER: f"{uid} {gid} {mode:o}",
        }
        program = "/usr/local/lib/datastore/ganeshapod.py"
        probe = {"exec": {"command": ["python3", "-I", "-S", program, "probe"]}, "timeoutSeconds": 10}
        container = {
            "name": "ganesha",
            "image": self._parameters.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "-I", "-S", program, "serve"],
            "env": [{"name": name, "value": text} for name, text in environment.items()],
            "ports": [{"containerPort": port} for port in (ganeshapod.NFS_PORT, ganeshapod.MOUNT_PORT)],
            "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": 120},
            "readinessProbe": {**probe, "periodSeconds": 10},
            "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 4},
            "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
            "securityContext": {**CONFINED, "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)}},
            "volumeMounts": [
                {"name": "volume", "mountPath": str(ganeshapod.VOLUME)},
                {"name": "run", "mountPath": "/run"},
                # Here Ganesha tries which locks the kernel knows.
                {"name": "run", "mountPath": "/tmp"},  # noqa: S108
            ],
        }
        pod = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 20,
            # The runtime's default profile forbids name_to_handle_at(2) up to containerd 1.6.
            "securityContext": {"runAsUser": 0, "seccompProfile": {"type": "Unconfined"}},
            "containers": [container],
            "volumes": [
                {"name": "volume", "persistentVolumeClaim": {"claimName": self._name}},
                {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
            ],
        }
        spec = {
            "replicas": 1,
            "serviceName": self._name,
            "selector": {"matchLabels": {UID: self._identity.uid}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": self._metadata(), "spec": spec}
