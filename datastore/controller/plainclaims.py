"""Plain PersistentVolumeClaims of a StorageClass of ours: each gets a Datastore of its name, which does the rest.

No provisioner sidecar is needed, and whoever wrote only a claim sees in the Datastore what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastore.api.volumecontext import DRIVER
from datastore.controller import desired
from datastore.controller.cache import Cache, Key
from datastore.controller.cluster import DATASTORES, ApiError, Cluster
from datastore.controller.conditions import Event
from datastore.controller.recorder import Recorder

Raw = Mapping[str, Any]
_SELECTED_NODE = "volume.kubernetes.io/selected-node"


class PlainClaims:
    """See the module."""

    def __init__(self, cluster: Cluster, cache: Cache, recorder: Recorder) -> None:
        self._cluster = cluster
        self._cache = cache
        self._recorder = recorder
        self._complained: set[str] = set()

    async def provision(self, key: Key) -> None:
        """Make the Datastore of a claim, if it is one that waits for us and has none."""
        claim = self._cache.claims.get(key)
        if claim is None or not self.waits(claim):
            return
        datastore = self._cache.datastores.get(key)
        if datastore is None:
            name = claim["spec"]["storageClassName"]
            storage_class = self._cache.classes.get(("", name))
            assert storage_class is not None, "waits() found it"
            try:
                made = await self._cluster.create(DATASTORES, key[0], desired.datastore_for(claim, storage_class))
            except ApiError as error:
                if error.status not in (403, 409):
                    raise
                # 409: the watch shows it in a moment. 403: the namespace is being deleted.
                return
            self._cache.datastores.put(made)
        elif not desired.is_for_claim(datastore, claim):
            await self._complain(claim)

    def waits(self, claim: Raw) -> bool:
        """Whether a claim is one of a class of ours that nobody has provisioned."""
        spec, metadata = claim["spec"], claim["metadata"]
        storage_class = self._cache.class_of(claim)
        if storage_class is None or storage_class.get("provisioner") != DRIVER or spec.get("volumeName"):
            return False
        if "deletionTimestamp" in metadata:
            return False
        late = storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"
        return not late or _SELECTED_NODE in (metadata.get("annotations") or {})

    async def _complain(self, claim: Raw) -> None:
        uid = claim["metadata"]["uid"]
        if uid in self._complained or len(self._complained) > 10_000:
            return
        self._complained.add(uid)
        text = "a Datastore of this name exists and was not made for this claim; rename one of them"
        about = {**claim, "apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        await self._recorder.record(about, Event(reason="NameTaken", message=text, warning=True))
