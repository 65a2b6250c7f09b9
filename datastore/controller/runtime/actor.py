"""What controllers do to objects: each change by the client, and its answer into the informer stores at once.

So the next decision sees what the last one did, before the watch shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastore.api.resources import BY_KIND, Resource
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.informers import InformerStore
from datastore.controller.runtime.recorder import Recorder

Raw = Mapping[str, Any]


class Actor:
    """stores: those of the kinds that are watched, by kind; objects of other kinds are not remembered."""

    def __init__(self, client: Client, recorder: Recorder, stores: Mapping[str, InformerStore]) -> None:
        self._client = client
        self._recorder = recorder
        self._stores = stores

    def take(self, body: Raw) -> None:
        """An answer of the API server about an object."""
        store = self._stores.get(body["kind"])
        if store is not None:
            store.put(body)

    async def apply(self, wanted: Raw) -> dict[str, Any]:
        """Server-side apply. Errors: ApiError, Unavailable, LeaseLost; so for all that follow."""
        found = await self._client.apply(wanted)
        self.take(found)
        return found

    async def merge(self, resource: Resource, body: Raw, change: Raw, subresource: str = "") -> None:
        """Merge a change into this very object; nothing when it is gone."""
        found = await self._client.merge(resource, body, change, subresource)
        if found is not None:
            self.take(found)

    async def tell(self, body: Raw, status: Mapping[str, Any], events: Sequence[Event] = ()) -> None:
        """Write the status if it says something new, then the Events: what they tell is true by then."""
        if status and status != body.get("status"):
            self.take(await self._client.apply({**_named(body), "status": status}, "status"))
        for event in events:
            await self._recorder.record(body, event)

    async def finalizer(self, body: Raw, name: str, *, present: bool) -> None:
        """Put our finalizer on an object or take it off. With the uid in it, one that is gone is not made anew."""
        change = _named(body)
        if present:
            change["metadata"]["finalizers"] = [name]
        try:
            self.take(await self._client.apply(change))
        except ApiError as error:
            if present or error.status not in (404, 409):
                raise

    async def delete(self, body: Raw) -> None:
        """Ask for the removal of this very object; one that is gone is success."""
        metadata = body["metadata"]
        namespace = metadata.get("namespace", "")
        left = await self._client.delete(BY_KIND[body["kind"]], namespace, metadata["name"], metadata["uid"])
        if left is not None:
            self.take(left)
        elif body["kind"] in self._stores:
            self._stores[body["kind"]].drop((namespace, metadata["name"]), metadata["uid"])

    async def look(self, body: Raw) -> dict[str, Any] | None:
        """The object as the API server has it now: its word, not the store's; None when it is gone."""
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
