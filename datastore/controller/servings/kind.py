"""The controller of Servings as a Kind for the operator (runtime/operator.py): its watches and its reconcile loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datastore.api.names import SERVING
from datastore.api.objects import timestamp
from datastore.api.resources import AUTOSCALERS, DATASTORES, DEPLOYMENTS, MODELS, PODS, SERVICES, SERVINGS
from datastore.controller.runtime.actor import Actor
from datastore.controller.runtime.client import ApiError, Client, Fence, Unavailable
from datastore.controller.runtime.informers import InformerStore, key_of
from datastore.controller.runtime.operator import Kind, Reconcile
from datastore.controller.runtime.ownimage import OwnImage
from datastore.controller.runtime.queue import Key, WorkQueue
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.runtime.watches import Watch
from datastore.controller.servings.decide import Observed, decide, store_of
from datastore.controller.servings.metrics import SERVINGS as COUNTED
from datastore.controller.servings.settings import Settings

Raw = Mapping[str, Any]
_MADE = ("Deployment", "Service", "HorizontalPodAutoscaler", "Pod")


class ServingKind(Kind):
    """See runtime.operator.Kind."""

    def __init__(self, settings: Settings, client: Client, _: Fence) -> None:
        self._settings = settings
        self._client = client
        self._queue = WorkQueue()
        kinds = ("Serving", "Model", "Datastore", *_MADE)
        self._stores = {kind: InformerStore() for kind in kinds}
        self._actor = Actor(client, Recorder(client, settings.identity), self._stores)
        self._image = OwnImage(client, settings, settings.verify_image)

    def watches(self) -> Sequence[Watch]:
        """See Kind. Our objects are watched by label; RBAC allows list and watch of these kinds and the Lease only."""
        made = {"Deployment": DEPLOYMENTS, "Service": SERVICES, "HorizontalPodAutoscaler": AUTOSCALERS, "Pod": PODS}
        return (
            Watch(resource=SERVINGS, tell=self._serving),
            Watch(resource=MODELS, tell=self._model),
            Watch(resource=DATASTORES, tell=self._datastore),
            *(Watch(resource=resource, tell=self._teller(kind), labels=SERVING) for kind, resource in made.items()),
        )

    def queues(self) -> Sequence[tuple[WorkQueue, Reconcile]]:
        """See Kind."""
        return ((self._queue, self._reconcile),)

    def refresh(self) -> None:
        """See Kind."""
        phases = Counter(str((each.get("status") or {}).get("phase", "New")) for each in self._servings())
        COUNTED.clear()
        for phase, count in phases.items():
            COUNTED.labels(phase).set(count)

    async def _reconcile(self, key: Key) -> float | None:
        """Bring one Serving as far as it goes now. Return None: events wake every Serving, so no timer is needed."""
        serving = self._stores["Serving"].get(key)
        if serving is None or "deletionTimestamp" in serving["metadata"]:
            return None
        image = await self._image.get()
        if image is None:
            raise Unavailable(f"there is no pod {self._settings.identity}, whose image would be used; --verify-image")
        model = self._stores["Model"].get((key[0], serving["spec"]["model"]))
        seen = Observed(
            serving=serving,
            model=model,
            store=self._stores["Datastore"].get((key[0], store_of(model))) if model else None,
            deployment=await self._there("Deployment", key),
            service=await self._there("Service", key),
            autoscaler=self._stores["HorizontalPodAutoscaler"].get(key),
            pods=[each for each in self._stores["Pod"].values() if _serving_of(each) == key],
            image=image,
            now=timestamp(),
        )
        plan = decide(seen)
        try:
            for each in plan.apply:
                await self._actor.apply(each)
        except ApiError as error:
            if error.refusal:
                told = decide(replace(seen, refused=error.refusal))
                await self._actor.tell(serving, told.status, told.events)
            raise
        for obsolete in plan.delete:
            await self._actor.delete(obsolete)
        await self._actor.tell(serving, plan.status, plan.events)
        return None

    async def _there(self, kind: str, key: Key) -> dict[str, Any] | None:
        """Return the object of this name, ours or not; the watch shows only ours, so else the API server is asked."""
        if (known := self._stores[kind].get(key)) is not None:
            return known
        resource = {"Deployment": DEPLOYMENTS, "Service": SERVICES}[kind]
        found = await self._client.get(resource, *key)
        if found is not None and _serving_of(found) == key:
            self._stores[kind].put(found)
        return found

    def _servings(self) -> list[dict[str, Any]]:
        return self._stores["Serving"].values()

    def _serving(self, event: Raw) -> None:
        self._queue.add(self._stores["Serving"].take(event))

    def _model(self, event: Raw) -> None:
        namespace, name = self._stores["Model"].take(event)
        for each in self._servings():
            if key_of(each)[0] == namespace and each["spec"].get("model") == name:
                self._queue.add(key_of(each))

    def _datastore(self, event: Raw) -> None:
        """Wake the Servings of the Models whose store this Datastore is."""
        namespace, name = self._stores["Datastore"].take(event)
        for each in self._servings():
            model = self._stores["Model"].get((namespace, each["spec"].get("model", "")))
            if key_of(each)[0] == namespace and model is not None and store_of(model) == name:
                self._queue.add(key_of(each))

    def _teller(self, kind: str) -> Callable[[Raw], None]:
        def tell(event: Raw) -> None:
            self._stores[kind].take(event)
            self._queue.add(_serving_of(event["object"]))

        return tell


def _serving_of(body: Raw) -> Key:
    """Return the key of the Serving that an object's label names."""
    metadata = body["metadata"]
    return metadata.get("namespace", ""), (metadata.get("labels") or {}).get(SERVING, "")
