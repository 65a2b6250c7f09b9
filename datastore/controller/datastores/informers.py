"""What the controller of Datastores watches, and which Datastores and plain claims an event concerns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datastore.api.names import MANAGED_BY, MANAGER
from datastore.api.resources import CLAIMS, CLASSES, DATASTORES, VOLUMES
from datastore.api.volumecontext import DRIVER
from datastore.backends.registry import KINDS
from datastore.controller.datastores.desired import owner_of
from datastore.controller.datastores.effective import DEFAULT_KIND, class_name_of, wants_default_class
from datastore.controller.runtime.informers import InformerStore, key_of
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.watches import Watch

Raw = Mapping[str, Any]
Wake = Callable[[Key], None]


class Informers:
    """The informer stores. wake, wake_claim: queue a Datastore, a plain claim; serves: whether a namespace is ours."""

    def __init__(self, wake: Wake, wake_claim: Wake, serves: Callable[[str], bool]) -> None:
        self.datastores = InformerStore()
        self.claims = InformerStore()
        self.volumes = InformerStore()
        self.classes = InformerStore()
        self.stores = {
            "Datastore": self.datastores,
            "PersistentVolumeClaim": self.claims,
            "PersistentVolume": self.volumes,
            "StorageClass": self.classes,
        }
        self._wrappers: dict[Key, Key] = {}
        """The key of a claim -> the key of a Datastore that wraps it."""
        self._wake = wake
        self._wake_claim = wake_claim
        self._serves = serves

    def watches(self) -> Sequence[Watch]:
        """What kopf lists and watches; the RBAC rules grant these two verbs only for this, the Lease and nodes."""
        return (
            Watch(resource=DATASTORES, tell=self._datastore),
            Watch(resource=CLAIMS, tell=self._claim),
            Watch(resource=VOLUMES, tell=self._volume, labels=f"{MANAGED_BY}={MANAGER}"),
            Watch(resource=CLASSES, tell=self._class),
        )

    def class_of(self, claim: Raw | None) -> dict[str, Any] | None:
        """The StorageClass that a claim names."""
        return self.classes.get(("", claim["spec"].get("storageClassName") or "")) if claim else None

    def class_for(self, datastore: Raw) -> dict[str, Any] | None:
        """The StorageClass of a Datastore: the one that it names, or the default one of its kind."""
        return self.classes.get(("", class_name_of(datastore, self.classes.values()) or ""))

    def nodes_wanted(self) -> bool:
        """Whether a StorageClass of ours needs the addresses of the cluster's nodes."""
        for each in self.classes.values():
            parameters = each.get("parameters") or {}
            kind = KINDS.get(parameters.get("backend", DEFAULT_KIND))
            if each.get("provisioner") == DRIVER and kind is not None and kind.needs_nodes(parameters):
                return True
        return False

    def server_namespaces(self) -> frozenset[str]:
        """The namespaces where our classes have NFS servers made, without those that are served, and so watched."""
        ours = [each.get("parameters") or {} for each in self.classes.values() if each.get("provisioner") == DRIVER]
        named = {KINDS["nfs"].claim(each, "") for each in ours if each.get("backend") == "nfs"}
        return frozenset(key[0] for key in named if key is not None and key[0] and not self._serves(key[0]))

    def server_claims(self, namespace: str, found: Mapping[Key, Raw]) -> None:
        """Take all claims of one of these namespaces; only those of our NFS servers count."""
        gone = [each for each in self.claims.values() if key_of(each)[0] == namespace and key_of(each) not in found]
        ours = [each for each in found.values() if owner_of(each) is not None]
        for kind, each in [*((None, each) for each in ours), *(("DELETED", each) for each in gone)]:
            event = {"type": kind, "object": each}
            if not self.claims.repeats(event):
                self.claims.take(event)
                self._claimed(each)

    def _datastore(self, event: Raw) -> None:
        if self.datastores.repeats(event):
            return
        key = self.datastores.take(event)
        wrapped = (event["object"].get("spec", {}).get("claim") or {}).get("name")
        if wrapped:
            self._wrappers[(key[0], wrapped)] = key
        self._wake(key)

    def _claim(self, event: Raw) -> None:
        """Handle an event of a claim: ours, one that a Datastore wraps, or a plain one of a class of ours."""
        if self.claims.repeats(event):
            return
        key = self.claims.take(event)
        self._claimed(event["object"])
        if event["object"]["spec"].get("storageClassName"):
            self._wake_claim(key)

    def _claimed(self, body: Raw) -> None:
        """Wake the Datastore that the claim belongs to, and the Datastore that wraps it."""
        key = key_of(body)
        if owner_of(body) or self.datastores.get(key):
            self._wake(owner_of(body) or key)
        if key in self._wrappers:
            self._wake(self._wrappers[key])

    def _volume(self, event: Raw) -> None:
        """Handle an event of a volume of ours, unless its Datastore is in a namespace that we don't serve."""
        owner = owner_of(event["object"])
        if owner is not None and not self._serves(owner[0]):
            return
        if self.volumes.repeats(event):
            return
        self.volumes.take(event)
        if owner is not None:
            self._wake(owner)

    def _class(self, event: Raw) -> None:
        """Handle an event of a class; wake its Datastores, which may differ now, and claims, which may have waited."""
        if self.classes.repeats(event):
            return
        _, name = self.classes.take(event)
        for datastore in self.datastores.values():
            if datastore.get("spec", {}).get("storageClassName") == name or wants_default_class(datastore):
                self._wake(key_of(datastore))
        for claim in self.claims.values():
            if claim["spec"].get("storageClassName") == name:
                self._claimed(claim)
                self._wake_claim(key_of(claim))
