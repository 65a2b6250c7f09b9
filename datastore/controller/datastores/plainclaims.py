"""Provisions plain PersistentVolumeClaims of our StorageClasses: each gets a Datastore of its name that does the rest.

No provisioner sidecar is needed, and a user who wrote only a claim sees its state in the Datastore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastore.api.names import MANAGED_BY, MANAGER
from datastore.api.objects import is_owned, timestamp
from datastore.api.resources import CLAIMS, DATASTORES
from datastore.api.volumecontext import DRIVER
from datastore.controller.datastores import desired
from datastore.controller.datastores.informers import Informers
from datastore.controller.runtime.actor import Actor
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.recorder import Recorder
from datastore.units import parse_quantity

Raw = Mapping[str, Any]
REFUSED = "datastore.dev/Refused"
"""The type of the condition of a claim that gets no volume."""
_REASON = "ClaimNotSupported"
_SELECTED_NODE = "volume.kubernetes.io/selected-node"


def refusal(claim: Raw) -> str:
    """Say why a claim can't have what it asks for, and what to write instead; '' when it can. Its spec is immutable."""
    spec = claim["spec"]
    if spec.get("dataSource") or spec.get("dataSourceRef"):  # the API server sets one from the other
        return (
            "spec.dataSource, spec.dataSourceRef: a volume of this class begins empty, and is made from no snapshot and"
            " no other claim; leave them out, and copy the files in a pod"
        )
    if spec.get("selector"):
        return "spec.selector: a volume of this class is made for the claim, and not chosen by labels; leave it out"
    if spec.get("volumeMode", "Filesystem") != "Filesystem":
        return "spec.volumeMode: a volume of this class is a directory, and no block device; leave it out"
    if "ReadWriteOncePod" in (spec.get("accessModes") or ()):
        return (
            "spec.accessModes: nothing keeps other pods off data that is in a store of its own, so ReadWriteOncePod"
            " would promise too much; write ReadWriteMany or ReadWriteOnce"
        )
    return ""


class PlainClaims:
    """See the module."""

    def __init__(self, client: Client, informers: Informers, recorder: Recorder) -> None:
        self._client = client
        self._actor = Actor(client, recorder, informers.stores)
        self._informers = informers
        self._recorder = recorder
        self._complained: set[tuple[str, str]] = set()

    async def provision(self, key: Key) -> float | None:
        """Make the Datastore of a claim that waits for it, or raise its capacity; see runtime.operator.Reconcile."""
        claim = self._informers.claims.get(key)
        datastore = self._informers.datastores.get(key)
        if claim is not None and datastore is not None and is_owned(datastore, claim["metadata"]["uid"]):
            await self._grow(datastore, claim)
            return None
        if claim is None or not self._is_of_ours(claim):
            return None
        if datastore is None and (refused := refusal(claim)):
            await self._refuse(claim, refused)
            return None
        if not self._waits(claim):
            return None
        if datastore is None:
            name = claim["spec"]["storageClassName"]
            storage_class = self._informers.classes.get(("", name))
            assert storage_class is not None, "_is_of_ours() found it"
            try:
                await self._actor.create(desired.datastore_for(claim, storage_class))
            except ApiError as error:
                if error.refusal:
                    text = f"the cluster does not accept the Datastore of this claim, which is tried again: {error}"
                    await self._complain(claim, "DatastoreRefused", text)
                if error.status != 409 and not error.namespace_ends:
                    raise
                # 409: the Datastore exists, and the watch shows it soon.
                return None
        else:
            text = "a Datastore of this name exists and was not made for this claim; rename one of them"
            await self._complain(claim, "NameTaken", text)
        return None

    async def _grow(self, datastore: Raw, claim: Raw) -> None:
        """Raise the Datastore's capacity to what its claim requests; the Datastore's reconcile does the rest."""
        asked = claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0")
        capacity = datastore["spec"].get("capacity", 0)
        if parse_quantity(asked) > parse_quantity(capacity):
            await self._client.merge(DATASTORES, datastore, {"spec": {"capacity": asked}})

    def _is_of_ours(self, claim: Raw) -> bool:
        """Whether a claim is of a class of ours, has no volume yet, is not being deleted, and was not made by us."""
        if (claim["metadata"].get("labels") or {}).get(MANAGED_BY) == MANAGER:
            return False
        storage_class = self._informers.class_of(claim)
        if storage_class is None or storage_class.get("provisioner") != DRIVER:
            return False
        return not claim["spec"].get("volumeName") and "deletionTimestamp" not in claim["metadata"]

    def _waits(self, claim: Raw) -> bool:
        """Whether the claim wants its volume now: its class binds at once, or a node was chosen for its first pod."""
        storage_class = self._informers.class_of(claim) or {}
        late = storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"
        return not late or _SELECTED_NODE in (claim["metadata"].get("annotations") or {})

    async def _refuse(self, claim: Raw, text: str) -> None:
        """Say once why a claim gets no volume: a condition, and an Event."""
        before = (claim.get("status") or {}).get("conditions") or []
        if any(each["type"] == REFUSED and each.get("message") == text for each in before):
            return
        told = {"type": REFUSED, "status": "True", "reason": _REASON, "message": text}
        told["lastTransitionTime"] = timestamp()
        conditions = [*(each for each in before if each["type"] != REFUSED), told]
        await self._actor.merge(CLAIMS, claim, {"status": {"conditions": conditions}}, "status")
        about = {**claim, "apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        await self._recorder.record(about, Event(reason=_REASON, message=text, warning=True))

    async def _complain(self, claim: Raw, reason: str, text: str) -> None:
        """Record a warning Event of this reason, once for each claim."""
        about = claim["metadata"]["uid"], reason
        if about in self._complained or len(self._complained) > 10_000:
            return
        self._complained.add(about)
        body = {**claim, "apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        await self._recorder.record(body, Event(reason=reason, message=text, warning=True))
