"""The node plugin's requests to the API server: about Datastores, by name or by volume, its Node's start-up taint, and
the ConfigMap in which it reports its pods' usage.

Errors of every method: those of datastore.kubeclient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datastore.api.names import usage_name, volume_name
from datastore.api.objects import owner_reference
from datastore.api.resources import CONFIGMAPS, DATASTORES, NODES, VOLUMES
from datastore.api.volumecontext import DRIVER, VolumeHandle, with_settings
from datastore.errors import NotFound
from datastore.kubeclient import Conflict, KubeClient

from .errors import Refused

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The Datastore that an inline volume names. attributes: its volume's volumeAttributes, with the present settings.

    secret: its Secret's name, or '' without a Secret in its own namespace. ending: whether it is being deleted.
    """

    attributes: Mapping[str, str]
    secret: str
    ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A Datastore's status, as far as its mounts need it. settings: status.mount; usage: counted bytes and objects."""

    settings: Mapping[str, Any] | None = None
    usage: tuple[int, int] | None = None


class Cluster:
    """The cluster in which the driver runs."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def named(self, namespace: str, name: str) -> Named:
        """Return a Datastore's volume. Errors: NotFound; Refused when it has no volume of this driver."""
        found = self._datastore(namespace, name)
        if (found.get("spec") or {}).get("claim"):
            raise Refused(f"Datastore {namespace}/{name} is another driver's volume; use its claim")
        volume = self._client.get(VOLUMES, volume_name(found["metadata"]["uid"]))
        if volume is None:
            raise Refused(f"Datastore {namespace}/{name} has no volume yet; kubectl describe dst says why")
        csi = volume.get("spec", {}).get("csi") or {}
        if csi.get("driver") != DRIVER:
            raise Refused(f"Datastore {namespace}/{name} is no volume of {DRIVER}; use its claim")
        secret = csi.get("nodePublishSecretRef") or {}
        attributes = dict(csi.get("volumeAttributes") or {})
        settings = (found.get("status") or {}).get("mount")
        return Named(
            attributes=with_settings(attributes, settings) if settings else attributes,
            secret=str(secret.get("name", "")) if secret.get("namespace") == namespace else "",
            ending="deletionTimestamp" in found["metadata"],
        )

    def seen(self, handle: VolumeHandle) -> Seen:
        """Return the status of a volume's Datastore. Errors: NotFound, also when a newer Datastore has its name."""
        found = self._datastore(handle.namespace, handle.name)
        if found["metadata"]["uid"] != handle.uid:
            raise NotFound(f"Datastore {handle.namespace}/{handle.name} is another one now")
        status = found.get("status") or {}
        counted = status.get("usage") or {}
        stored, objects = counted.get("bytes"), counted.get("objects")
        usage = (stored, objects) if isinstance(stored, int) and isinstance(objects, int) else None
        return Seen(settings=status.get("mount"), usage=usage)

    def remove_taint(self, node: str, key: str) -> bool:
        """Remove a taint; return whether it was there. Errors: NotFound; Conflict when the Node keeps changing."""
        tries = TRIES
        while True:
            found = self._client.get(NODES, node)
            if found is None:
                raise NotFound(f"there is no node {node}")
            taints = found.get("spec", {}).get("taints") or []
            others = [taint for taint in taints if taint.get("key") != key]
            if len(others) == len(taints):
                return False
            # With the resourceVersion, so that a taint which another client adds now is not lost.
            version = {"resourceVersion": found["metadata"]["resourceVersion"]}
            tries -= 1
            try:
                self._client.patch(NODES, node, {"metadata": version, "spec": {"taints": others or None}})
            except Conflict:
                if not tries:
                    raise
            else:
                return True

    def usage(self, node: str) -> dict[str, str]:
        """Return the last report on a node's pods; by an empty patch, because the plugin may not read ConfigMaps."""
        try:
            return dict(self._client.patch(CONFIGMAPS, usage_name(node), {}).get("data") or {})
        except NotFound:
            return {}

    def tell_usage(self, node: str, data: Mapping[str, str]) -> None:
        """Report the usage of a node's pods, in a ConfigMap that the Node owns. Errors: NotFound without a Node."""
        try:
            found = self._client.patch(CONFIGMAPS, usage_name(node), {"data": dict(data)})
        except NotFound:
            self._client.create(CONFIGMAPS, self._usage_object(node, data))
            return
        if gone := dict.fromkeys((found.get("data") or {}).keys() - data.keys()):
            self._client.patch(CONFIGMAPS, usage_name(node), {"data": gone})

    def _usage_object(self, node: str, data: Mapping[str, str]) -> dict[str, Any]:
        found = self._client.get(NODES, node)
        if found is None:
            raise NotFound(f"there is no node {node}")
        owner = owner_reference("Node", node, found["metadata"]["uid"], api_version="v1", controller=False)
        metadata = {"name": usage_name(node), "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(data)}

    def _datastore(self, namespace: str, name: str) -> dict[str, Any]:
        found = self._client.get(DATASTORES, name, namespace=namespace)
        if found is None:
            raise NotFound(f"there is no Datastore {name} in namespace {namespace}")
        return found
