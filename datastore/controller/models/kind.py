"""The reconcile loops of Models, ModelVersions and ModelExports: observe, decide, act, and again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from datastore.api.model import ModelExport, ModelVersion
from datastore.api.names import MANAGED_BY, MODEL, MODEL_VERSION, SERVING, volume_name
from datastore.api.objects import claims_of, condition, timestamp
from datastore.api.resources import (
    CLAIMS,
    CLASSES,
    DATASTORES,
    EXPORTS,
    JOBS,
    MODELS,
    PODS,
    SERVINGS,
    VERSIONS,
    VOLUMES,
)
from datastore.controller.datastores.pods import NOT_ENDED
from datastore.controller.models import update
from datastore.controller.models import volume as volumes
from datastore.controller.models.decide import Observed, Plan, decide, is_saved, saved_it, store_name, store_of
from datastore.controller.models.exports import (
    VERB,
    ObservedExport,
    decide_export,
    is_over,
)
from datastore.controller.models.job import (
    answer_of,
    ended,
    job_name,
    progress_of,
    running,
    verb_of,
    waiting_for,
)
from datastore.controller.runtime.actor import Actor
from datastore.controller.runtime.client import ApiError, Client, Fence
from datastore.controller.runtime.informers import InformerStore, key_of
from datastore.controller.runtime.mistakes import Mistake, parsed
from datastore.controller.runtime.operator import Kind, Reconcile
from datastore.controller.runtime.ownimage import OwnImage
from datastore.controller.runtime.queue import Key, WorkQueue
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.runtime.settings import RuntimeSettings
from datastore.controller.runtime.watches import Watch

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]
Seen = TypeVar("Seen", Observed, ObservedExport, update.ObservedModel)

FOR_MODELS = "datastore.dev/models"
"""Annotation of a StorageClass: "true" if a namespace's store is made from this class on first use."""
STEPS_MAX = 8
SOON_S = 2.0
WAITING_S = 30.0
"""How soon an object that waits for a person to change something is reconciled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RuntimeSettings):
    """What an administrator chooses. job_image: the image of the Jobs; '': that of the controller's pod."""

    identity: str = volumes.MANAGER
    workers: int = 4
    job_image: str = ""


class ModelKind(Kind):
    """See runtime.operator.Kind."""

    def __init__(self, settings: Settings, client: Client, fence: Fence) -> None:
        self._client = client
        self._queues = {name: WorkQueue() for name in ("ModelVersion", "Model", "ModelExport")}
        self._stores = {name: InformerStore() for name in (*self._queues, "Datastore", "Serving", "Job")}
        self._actor = Actor(client, Recorder(client, settings.identity), self._stores)
        self._image = OwnImage(client, settings, settings.job_image)

    def watches(self) -> Sequence[Watch]:
        """See Kind."""
        return (
            Watch(resource=VERSIONS, tell=self._teller("ModelVersion")),
            Watch(resource=EXPORTS, tell=self._teller("ModelExport")),
            Watch(resource=MODELS, tell=self._of_namespace("Model")),
            Watch(resource=DATASTORES, tell=self._of_namespace("Datastore")),
            Watch(resource=SERVINGS, tell=self._serving),
            Watch(resource=JOBS, tell=self._job, labels=f"{MANAGED_BY}={volumes.MANAGER}"),
        )

    def queues(self) -> Sequence[tuple[WorkQueue, Reconcile]]:
        """See Kind."""
        work = {"ModelVersion": self._reconcile, "Model": self._update, "ModelExport": self._export}
        return tuple((queue, work[name]) for name, queue in self._queues.items())

    def _teller(self, kind: str) -> Callable[[Raw], None]:
        return lambda event: self._queues[kind].add(self._stores[kind].take(event))

    def _job(self, event: Raw) -> None:
        namespace, _ = self._stores["Job"].take(event)
        for owner in event["object"]["metadata"].get("ownerReferences") or ():
            if owner["kind"] in self._queues:
                self._queues[owner["kind"]].add((namespace, owner["name"]))

    def _serving(self, event: Raw) -> None:
        namespace, _ = self._stores["Serving"].take(event)
        self._queues["Model"].add((namespace, event["object"]["spec"]["model"]))

    def _of_namespace(self, kind: str) -> Callable[[Raw], None]:
        """Return the handler of a kind's events, which wakes the waiting versions and exports of the namespace."""

        def tell(event: Raw) -> None:
            key = self._stores[kind].take(event)
            if kind == "Model":
                self._queues[kind].add(key)
            for waiting in ("ModelVersion", "ModelExport"):
                for each in self._stores[waiting].values():
                    phase = (each.get("status") or {}).get("phase")
                    if each["metadata"]["namespace"] == key[0] and phase in (None, "Pending"):
                        self._queues[waiting].add(key_of(each))

        return tell

    async def _update(self, key: Key) -> float | None:
        """Reconcile a Model."""
        for _ in range(STEPS_MAX):
            model = self._stores["Model"].get(key)
            if model is None:
                return None
            store = self._stores["Datastore"].get((key[0], store_name(model)))
            servings = [each for each in self._stores["Serving"].values() if each["metadata"]["namespace"] == key[0]]
            job = self._stores["Job"].get((key[0], job_name(model, update.VERB)))
            wanted = update.wanted_of(model, servings)
            volume = await self._volume(store) if wanted["moves"] or wanted["pins"] else None
            work = await self._work(store, volume, job)
            seen = update.ObservedModel(model=model, servings=servings, **work)
            plan = await self._carry_out(update.decide_model, seen, model)
            if not (plan.create or plan.delete):
                return _again(plan, waits=job is None and condition(model, update.CONDITION).get("status") == "False")
        return SOON_S

    async def _export(self, key: Key) -> float | None:
        """Reconcile a ModelExport."""
        for _ in range(STEPS_MAX):
            body = self._stores["ModelExport"].get(key)
            if body is None or is_over(body):
                return None
            try:
                spec = parsed(body, ModelExport).spec
            except Mistake:
                await self._act(body, decide_export(ObservedExport(export=body, now=timestamp())))
                return None
            model = self._stores["Model"].get((key[0], spec.model))
            store = self._stores["Datastore"].get((key[0], store_name(model)))
            target = self._stores["Datastore"].get((key[0], spec.to.datastore))
            job = self._stores["Job"].get((key[0], job_name(body, VERB)))
            seen = ObservedExport(
                export=body,
                model=model,
                target=target,
                target_volume=await self._volume(target) if job is None else None,
                **await self._work(store, await self._volume(store) if job is None else None, job),
            )
            plan = await self._carry_out(decide_export, seen, body)
            if not (plan.create or plan.delete):
                return _again(plan, waits=(plan.status or {}).get("phase") == "Pending")
        return SOON_S

    async def _reconcile(self, key: Key) -> float | None:
        for _ in range(STEPS_MAX):
            body = self._stores["ModelVersion"].get(key)
            if body is None:
                return None
            seen = await self._observe(key, body)
            try:
                plan = await self._carry_out(decide, seen, body, seen.model)
            except ApiError as error:
                if not error.namespace_ends:
                    raise
                # The namespace takes no new Job. The bytes stay in the store, whose end is its Datastore's matter.
                plan = await self._carry_out(decide, replace(seen, namespace_ends=True), body, seen.model)
            if not plan.soon:
                return _again(plan, waits=(plan.status or {}).get("phase") in ("Pending", "Deleting"))
            if not (plan.create or plan.apply or plan.delete or plan.finalizer or plan.model_status):
                break
        return SOON_S

    async def _observe(self, key: Key, body: Raw) -> Observed:
        namespace, name = key
        try:
            version = parsed(body, ModelVersion)
        except Mistake:
            return Observed(version=body, now=timestamp())
        going = "deletionTimestamp" in body["metadata"]
        model = self._stores["Model"].get((namespace, version.spec.model))
        store = self._stores["Datastore"].get((namespace, store_of(body, model)))
        named = version.spec.source.datastore if version.spec.source else ""
        source = self._stores["Datastore"].get((namespace, named)) if named else None
        jobs = self._stores["Job"]
        job = jobs.get((namespace, job_name(body, verb_of(version))))
        if going:
            job = job if job is not None and not ended(job) else jobs.get((namespace, job_name(body, "delete")))
        claim = await self._client.get(CLAIMS, namespace, name) if going or is_saved(body) else None
        volume = await self._volume(store) if going or claim is None else None
        return Observed(
            version=body,
            model=model,
            source=source,
            source_volume=await self._volume(source) if not is_saved(body) and not going else None,
            claim=claim,
            in_use=await self._users(body, saved_it=saved_it(body, version)) if going else "",
            classes=await self._classes() if store is None and not going else (),
            **await self._work(store, volume, job, asked=going or not is_saved(body)),
        )

    async def _work(self, store: Raw | None, volume: Raw | None, job: Raw | None, *, asked: bool = True) -> Any:
        """Return the fields of SeenWork. asked: whether the Job and its pods are asked how far they are."""
        answer, progress, waiting = await self._asked(job) if job is not None and asked else ({}, None, "")
        return {
            "now": timestamp(),
            "store": store,
            "store_volume": volume,
            "job": job,
            "answer": answer,
            "progress": progress,
            "waiting": waiting,
            "image": await self._image.get(),
        }

    async def _volume(self, datastore: Raw | None) -> Raw | None:
        if datastore is None:
            return None
        return await self._client.get(VOLUMES, "", volume_name(datastore["metadata"]["uid"]))

    async def _asked(self, job: Raw) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
        """Return a Job's answer, the progress of its running pod, and why its newest pod does not run yet."""
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        pods = await self._client.list(PODS, namespace, label_selector=f"job-name={name}")
        pod = "" if ended(job) else running(pods)
        progress = None
        if pod:
            try:
                text = await self._client.text(
                    PODS.path(namespace, pod, "log"), {"tailLines": "1", "limitBytes": "4096"}
                )
                progress = progress_of(text)
            except ApiError:  # the pod has just ended, or its container has not started
                progress = None
        return answer_of(pods), progress, waiting_for(job, pods)

    async def _users(self, body: Raw, *, saved_it: bool) -> str:
        """Return what uses a version: pods with its claim; if saved_it, also Servings, their pods, and other claims."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        model, number = body["spec"]["model"], (body.get("status") or {}).get("version")
        found: list[str] = []
        if number and saved_it:
            found += self._servings_of(namespace, model, number)
            text = f"{namespace}/{model}:{number}"
            claims = await self._client.list(CLAIMS, namespace, label_selector=f"{MANAGED_BY}={volumes.MANAGER}")
            for each in claims:
                metadata = each["metadata"]
                same = (metadata.get("annotations") or {}).get(volumes.VERSION_OF) == text
                if same and (metadata.get("labels") or {}).get(volumes.OWNED_BY) != body["metadata"]["uid"]:
                    owner: Raw = next(iter(metadata.get("ownerReferences") or []), {})
                    found.append(f"{owner.get('kind', 'claim')} {owner.get('name', metadata['name'])}")
        for pod in await self._client.list(PODS, namespace, NOT_ENDED):
            labels = pod["metadata"].get("labels") or {}
            shows = saved_it and (labels.get(MODEL), labels.get(MODEL_VERSION)) == (model, str(number))
            of_serving = f" of Serving {labels[SERVING]}" if SERVING in labels else ""
            if shows or name in claims_of(pod):
                found.append(f"pod {pod['metadata']['name']}{of_serving}")
        return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")

    def _servings_of(self, namespace: str, model: str, number: int) -> list[str]:
        """Return the Servings whose spec names a version: by its number, or by an alias of it."""
        aliases = ((self._stores["Model"].get((namespace, model)) or {}).get("status") or {}).get("aliases") or ()
        naming = {each["name"] for each in aliases if each["version"] == number}
        return [
            f"Serving {each['metadata']['name']}"
            for each in self._stores["Serving"].values()
            if (each["metadata"]["namespace"], each["spec"]["model"]) == (namespace, model)
            and (each["spec"].get("version") == number or each["spec"].get("alias") in naming)
        ]

    async def _classes(self) -> Sequence[str]:
        found = await self._client.list(CLASSES, "")
        return [
            each["metadata"]["name"]
            for each in found
            if (each["metadata"].get("annotations") or {}).get(FOR_MODELS) == "true"
        ]

    async def _carry_out(
        self, decide_on: Callable[[Seen], Plan], seen: Seen, body: Raw, model: Raw | None = None
    ) -> Plan:
        """Decide and act, and return the plan. What the API server refuses is told in the status, and raised."""
        plan = decide_on(seen)
        try:
            await self._act(body, plan, model)
        except ApiError as error:
            if error.refusal:
                await self._act(body, decide_on(replace(seen, refused=error.refusal)), model)
            raise
        return plan

    async def _act(self, body: Raw, plan: Plan, model: Raw | None = None) -> None:
        """Carry out a plan for this object. model: the Model whose status the plan may change, too."""
        if plan.finalizer:
            await self._actor.finalizer(body, present=True)
        for wanted in plan.create:
            await self._create(wanted)
        for wanted in plan.apply:
            await self._actor.apply(wanted)
        for each in plan.delete:
            await self._actor.delete(each)
        if plan.model_status and model is not None:
            await self._actor.tell(model, plan.model_status)
        await self._actor.tell(body, plan.status or {}, plan.events)
        if plan.finalizer is False:
            number = (body.get("status") or {}).get("version")
            if number:
                name = volumes.volume_name(body["metadata"]["uid"], int(number))
                found = await self._client.get(VOLUMES, "", name)
                if found is not None:
                    await self._actor.delete({**found, "kind": "PersistentVolume"})
            await self._actor.finalizer(body, present=False)

    async def _create(self, wanted: Raw) -> None:
        """Create an object unless it exists. Errors: ApiError, as when its namespace has no room for it or ends."""
        try:
            await self._actor.create(wanted)
        except ApiError as error:
            if error.status != 409:
                raise


def _again(plan: Plan, *, waits: bool) -> float | None:
    """Return the seconds to the next reconcile: few during work, more if a person has to act; None: at an event."""
    return SOON_S if plan.soon else WAITING_S if waits else None
