"""Changes objects, and puts the answers into the informer stores, so that decisions see them before the watch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastore.api.names import FINALIZER
from datastore.api.resources import BY_KIND, Resource
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.informers import InformerStore
from datastore.controller.runtime.recorder import Recorder

Raw = Mapping[str, Any]


class Actor:
    """stores: the informer stores by kind; objects of kinds that are not watched are not remembered."""

    def __init__(self, client: Client, recorder: Recorder, stores: Mapping[str, InformerStore]) -> None:
        self._client = client
        self._recorder = recorder
        self._stores = stores

    def take(self, body: Raw) -> None:
        """Put an object from an answer of the API server into the informer store of its kind."""
        store = self._stores.get(body["kind"])
        if store is not None:
            store.put(body)

    async def apply(self, wanted: Raw) -> dict[str, Any]:
        """Apply an object by server-side apply. Errors: ApiError, Unavailable, LeaseLost, as for all methods below."""
        found = await self._client.apply(wanted)
        self.take(found)
        return found

    async def create(self, wanted: Raw) -> dict[str, Any]:
        """Create an object; ApiError 409 when one of its name is there."""
        found = await self._client.create(BY_KIND[wanted["kind"]], wanted["metadata"]["namespace"], wanted)
        self.take(found)
        return found

    async def merge(self, resource: Resource, body: Raw, change: Raw, subresource: str = "") -> None:
        """Merge a change into the object with this uid; do nothing when it is gone."""
        found = await self._client.merge(resource, body, change, subresource)
        if found is not None:
            self.take(found)

    async def tell(self, body: Raw, status: Mapping[str, Any], events: Sequence[Event] = ()) -> None:
        """Write the status if it says something new, and then the Events, so that what they say is true by then."""
        if status and status != body.get("status"):
            self.take(await self._client.apply({**_named(body), "status": status}, "status"))
        for event in events:
            await self._recorder.record(body, event)

    async def finalizer(self, body: Raw, *, present: bool) -> None:
        """Put our finalizer on an object or take it off. The uid keeps apply from creating a deleted object again."""
        change = _named(body)
        if present:
            change["metadata"]["finalizers"] = [FINALIZER]
        try:
            self.take(await self._client.apply(change))
        except ApiError as error:
            if present or error.status not in (404, 409):
                raise

    async def delete(self, body: Raw) -> None:
        """Delete the object with this uid; if it is gone, that is success."""
        metadata = body["metadata"]
        namespace = metadata.get("namespace", "")
        left = await self._client.delete(BY_KIND[body["kind"]], namespace, metadata["name"], metadata["uid"])
        if left is not None:
            self.take(left)
        elif body["kind"] in self._stores:
            self._stores[body["kind"]].drop((namespace, metadata["name"]), metadata["uid"])

    async def look(self, body: Raw) -> dict[str, Any] | None:
        """Return the object as the API server has it now, and update the store; None when it is gone."""
        metadata = body["metadata"]
        namespace = metadata.get("namespace", "")
        found = await self._client.get(BY_KIND[body["kind"]], namespace, metadata["name"])
        if found is not None:
            self.take(found)
        elif body["kind"] in self._stores:
            self._stores[body["kind"]].drop((namespace, metadata["name"]), metadata.get("uid", ""))
        return found


def _named(body: Raw) -> dict[str, Any]:
    metadata = {name: body["metadata"][name] for name in ("name", "namespace", "uid") if name in body["metadata"]}
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata}
