"""What the node plugin asks of the API server: Datastores, by name or by their volume, its Node's start-up taint, and
to keep what its pods use.

Errors of every method: those of datastore.kubeclient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datastore.api.names import usage_name, volume_name
from datastore.api.resources import CONFIGMAPS, DATASTORES, NODES, VOLUMES
from datastore.api.volumecontext import DRIVER, VolumeHandle, with_settings
from datastore.errors import NotFound
from datastore.kubeclient import Conflict, KubeClient

from .errors import Refused

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What an inline volume that names a Datastore is of. secret: of the Datastore's namespace; '': it has none.

    ending: it is being deleted.
    """

    attributes: Mapping[str, str]
    secret: str
    ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a Datastore's status says for its mounts. settings: status.mount; usage: bytes and objects, as counted."""

    settings: Mapping[str, Any] | None = None
    usage: tuple[int, int] | None = None


class Cluster:
    """The cluster that we run in."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def named(self, namespace: str, name: str) -> Named:
        """A Datastore's volume. Errors: NotFound; Refused when it has none of ours."""
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
        """The Datastore of a volume. Errors: NotFound, also when another one has its name now."""
        found = self._datastore(handle.namespace, handle.name)
        if found["metadata"]["uid"] != handle.uid:
            raise NotFound(f"Datastore {handle.namespace}/{handle.name} is another one now")
        status = found.get("status") or {}
        counted = status.get("usage") or {}
        stored, objects = counted.get("bytes"), counted.get("objects")
        usage = (stored, objects) if isinstance(stored, int) and isinstance(objects, int) else None
        return Seen(settings=status.get("mount"), usage=usage)

    def remove_taint(self, node: str, key: str) -> bool:
        """Whether it was there. Errors: NotFound; Conflict when the node keeps changing."""
        tries = TRIES
        while True:
            found = self._client.get(NODES, node)
            if found is None:
                raise NotFound(f"there is no node {node}")
            taints = found.get("spec", {}).get("taints") or []
            others = [taint for taint in taints if taint.get("key") != key]
            if len(others) == len(taints):
                return False
            # With the version, so that a taint which another one adds meanwhile is not lost.
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
        """What was told last of the pods of a node. By a change of nothing: we have no right to read ConfigMaps."""
        try:
            return dict(self._client.patch(CONFIGMAPS, usage_name(node), {}).get("data") or {})
        except NotFound:
            return {}

    def tell_usage(self, node: str, data: Mapping[str, str]) -> None:
        """Tell what the pods of a node use, in an object that goes with the Node. Errors: NotFound without a Node."""
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
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": found["metadata"]["uid"]}
        metadata = {"name": usage_name(node), "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(data)}

    def _datastore(self, namespace: str, name: str) -> dict[str, Any]:
        found = self._client.get(DATASTORES, name, namespace=namespace)
        if found is None:
            raise NotFound(f"there is no Datastore {name} in namespace {namespace}")
        return found
