"""The loop around decide(): observe, decide, act, repeat. Everything that it remembers is found after a restart."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from datastore.api.datastore import API_VERSION
from datastore.api.explain import explain
from datastore.api.objects import is_owned, timestamp
from datastore.api.resources import BY_KIND, CONFIGMAPS, JOBS, NODES, PODS
from datastore.api.trainingjob import KIND, TrainingJob, role_of
from datastore.controller.runtime.actor import Actor
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.trainingjobs import desired, overlay
from datastore.controller.trainingjobs.capacity import lacking, too_large
from datastore.controller.trainingjobs.decide import REFUSED, decide, save_begun, with_saved
from datastore.controller.trainingjobs.informers import Informers
from datastore.controller.trainingjobs.keeping import EvidenceWriter, kept
from datastore.controller.trainingjobs.metrics import FREED_SECONDS
from datastore.controller.trainingjobs.plan import Observed, Plan
from datastore.controller.trainingjobs.settings import Settings
from datastore.controller.trainingjobs.usage import UsageCollector
from datastore.errors import InvalidManifest
from datastore.logs import fields
from datastore.training.cluster import names
from datastore.training.cluster.replicas import replicas_of
from datastore.training.conditions import SAVING
from datastore.training.driver import check
from datastore.training.policy import policy_of
from datastore.training.topology import RANKED

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

STEPS_MAX = 12
"""The most steps for one TrainingJob before others have their turn."""
REFUSED_S = 10.0
"""How soon an object is tried again that the cluster refuses for now (a quota, a name that is taken)."""


class _Refused(Exception):
    """The cluster does not accept an object of ours. permanent: it never will."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class _NotSavedYet(Exception):
    """The cluster does not accept the ModelVersion of a job now."""


@dataclass(slots=True)
class _Known:
    """What is remembered of a TrainingJob between two steps. The fields besides uid: see Observed."""

    uid: str
    collected: frozenset[str] = frozenset()
    board_refused: str | None = None
    room: str | None = None


class Reconciler:
    """Reconciles TrainingJobs: many at once, but each by one task at a time."""

    def __init__(self, client: Client, recorder: Recorder, informers: Informers, settings: Settings) -> None:
        self._client = client
        self._informers = informers
        self._settings = settings
        self._actor = Actor(client, recorder, informers.stores)
        self.usage = UsageCollector(client, informers, settings.namespace)
        self._evidence = EvidenceWriter(client, self._actor, self.usage)
        self._known: dict[Key, _Known] = {}

    def phases(self) -> Counter[str]:
        """Count the TrainingJobs by phase."""
        bodies = self._informers.trainingjobs.values()
        return Counter((body.get("status") or {}).get("phase", "Pending") for body in bodies)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one TrainingJob as far as possible now; see runtime.operator.Reconcile."""
        for _ in range(STEPS_MAX):
            body = self._informers.trainingjobs.get(key)
            if body is None:
                self._known.pop(key, None)
                return None
            known = self._known.get(key)
            if known is None or known.uid != body["metadata"]["uid"]:
                known = self._known[key] = _Known(uid=body["metadata"]["uid"])
            if await self._ends_with_namespace(key):
                return None
            body = {**body, "apiVersion": API_VERSION, "kind": KIND}
            job, invalid = self._parsed(body)
            plan = decide(self._observed(key, body, job, invalid, known))
            try:
                await self._act(key, body, job, plan, known)
            except _NotSavedYet:
                return REFUSED_S
            except _Refused as error:
                await self._say_refused(body, error)
                if not error.permanent:
                    return REFUSED_S
                continue
            if not plan.again:
                return plan.after_s
        return 0.0

    async def _ends_with_namespace(self, key: Key) -> bool:
        """Delete the Jobs if the namespace is being deleted, and return whether it is.

        Kubernetes keeps a failed pod of a Job with backoffLimitPerIndex until it has made the next one. A namespace
        that is being deleted takes no new pod, and nothing else in it is deleted before the pods are gone.
        """
        ending = any("deletionTimestamp" in pod["metadata"] for pod in self._informers.pods_of(key))
        if not ending or not await self._client.namespace_ends(key[0]):
            return False
        for each in self._informers.jobs_of(key).values():
            await self._delete(each)
        return True

    def _parsed(self, body: Raw) -> tuple[TrainingJob | None, str]:
        """Return the job, or why it can't run. No edit of fields that count only at the start ends a job that runs."""
        try:
            job = TrainingJob.model_validate({name: body[name] for name in ("apiVersion", "kind", "metadata", "spec")})
        except ValidationError as error:
            return None, explain(error, TrainingJob)
        phase = (body.get("status") or {}).get("phase")
        if phase in ("Running", "Restarting", "Succeeded", "Failed"):
            return job, ""
        try:
            check(job)
        except InvalidManifest as error:
            return None, str(error)
        why = overlay.refusal(job.spec, self._settings.overlays)
        if job.spec.save is not None and not self._settings.saves_models:
            why = (
                "spec.save: this cluster saves no Models (the component models is not installed); leave it out, or ask "
                "the administrator"
            )
        without = [role for role in desired.roles_of(names.cluster_topology(job)) if not role_of(job.spec, role).image]
        if without:
            why = f"spec.image is missing: a cluster needs one for {without[0]}"
        return (None, why) if why else (job, "")

    def _observed(self, key: Key, body: Raw, job: TrainingJob | None, invalid: str, known: _Known) -> Observed:
        wanted = {each.name for each in job.spec.datastores} if job else set()
        found = {name: self._informers.datastores.get((key[0], name)) for name in wanted}
        return Observed(
            body=body,
            job=job,
            invalid=invalid,
            datastores={name: each for name, each in found.items() if each is not None},
            jobs=self._informers.jobs_of(key),
            pods=self._informers.pods_of(key),
            runs=self._informers.runs_of(key) if job and job.spec.schedule else (),
            collected=known.collected,
            version=self._informers.versions.get((key[0], names.version_name(key[1], known.uid))),
            board=self._informers.board_of(key),
            board_refused=known.board_refused,
            room=known.room,
            now=datetime.now(UTC),
        )

    async def _act(self, key: Key, body: Raw, job: TrainingJob | None, plan: Plan, known: _Known) -> None:
        if plan.make_roles and job is not None:
            await self._make(body, job, plan)
        for wanted in plan.create:
            await self._create(body["metadata"]["uid"], wanted)
        for pod, rank in plan.ranks:
            change = {"metadata": {"annotations": {names.RANK: str(rank)}}, "spec": {"schedulingGates": None}}
            await self._actor.merge(PODS, _of_kind(pod, "Pod"), change)
        if plan.board is not None:
            await self._make_board(body, plan.board, known)
        known.room = await self._room(self._informers.jobs_of(key)) if plan.look else None
        if plan.collect:
            await self._collect(key, body, job, plan, known)
        for each, run in plan.start:
            await self._actor.merge(JOBS, _of_kind(each, "Job"), {"spec": {"suspend": not run}})
        if plan.save and job is not None:
            await self._save(body, job, plan)
            return
        before = (body.get("status") or {}).get("freedSeconds")
        await self._actor.tell(body, plan.status, plan.events)
        if before is None and (seconds := plan.status.get("freedSeconds")) is not None:
            FREED_SECONDS.observe(seconds)
        for each in plan.delete:
            await self._delete(each)

    async def _make(self, body: Raw, job: TrainingJob, plan: Plan) -> None:
        if why := overlay.refusal(job.spec, self._settings.overlays):
            raise _Refused(why, permanent=True)  # the template was edited since _parsed() checked it
        uid, topology = body["metadata"]["uid"], names.cluster_topology(job)
        policy = policy_of(job.spec, topology)
        attempt = int(plan.status.get("restarts") or 0) if policy.restart == "all" else 0
        for each in desired.common(job, uid, topology, secrets.token_hex(32)):
            await self._create(uid, each)
        for role in plan.make_roles:
            made = desired.role_job(job, uid, topology, policy, role, plan.claims, attempt, suspended=plan.suspended)
            await self._create(uid, made)

    async def _make_board(self, body: Raw, wanted: Raw, known: _Known) -> None:
        """Make the Job of a TensorBoard; if the cluster refuses it, report that, and let the training continue."""
        try:
            await self._create(known.uid, wanted)
        except _Refused as error:
            known.board_refused = wanted["metadata"]["annotations"][names.BOARD]
            event = Event(reason="NoTensorBoard", message=str(error), warning=True)
            await self._actor.tell(body, body.get("status") or {}, (event,))

    async def _create(self, uid: str, wanted: Raw) -> None:
        """Make an object, unless it exists and was made for this TrainingJob. Errors: _Refused."""
        what = f"{wanted['kind']} {wanted['metadata']['name']}"
        try:
            await self._actor.create(wanted)
            return
        except ApiError as error:
            if error.status in (400, 422):
                raise _Refused(f"the cluster does not take the {what}: {error}", permanent=True) from None
            if error.status == 403:
                raise _Refused(f"the cluster does not take the {what} now: {error}", permanent=False) from None
            if error.status != 409:
                raise
        if wanted["kind"] == "Secret":
            return  # we may not read Secrets; with a wrong one no replica starts
        found = await self._actor.look(wanted)
        origin = ((found or {}).get("spec") or {}).get("origin") or {}
        if found is not None and not is_owned(found, uid) and origin.get("trainingJobUID") != uid:
            raise _Refused(f"{what} exists and was not made for this TrainingJob; rename one of them", permanent=False)

    async def _save(self, body: Raw, job: TrainingJob, plan: Plan) -> None:
        """Make the ModelVersion of a job that has succeeded, and write the result into its status."""
        uid, now = body["metadata"]["uid"], datetime.now(UTC)
        evidence, _ = kept(await self._client.get(CONFIGMAPS, job.namespace, names.evidence_name(job.name)))
        images = [each.image for each in evidence.replicas if each.role in RANKED]
        try:
            await self._create(uid, desired.model_version(job, uid, images[0] if images else ""))
        except _Refused as error:
            reason = REFUSED if error.permanent else SAVING
            status = with_saved(plan.status, reason, str(error), now)
            event = Event(reason="NotSaved", message=str(error), warning=True)
            await self._actor.tell(body, status, () if status == body.get("status") else (event,))
            if not error.permanent:
                raise _NotSavedYet from None
        else:
            await self._actor.tell(body, save_begun(body, plan.status, now))

    async def _say_refused(self, body: Raw, error: _Refused) -> None:
        before, message = body.get("status") or {}, str(error)[:4096]
        status: dict[str, Any] = {"restarts": 0, **before, "phase": "Pending", "message": message}
        event = Event(reason="Refused", message=message, warning=True)
        if error.permanent:
            now = timestamp()
            failed = {"type": "Failed", "status": "True", "reason": "InvalidSpec", "message": message}
            failed["lastTransitionTime"] = status["completionTime"] = now
            status["conditions"] = [*(before.get("conditions") or []), failed]
        await self._actor.tell(body, status, () if before.get("message") == message else (event,))

    async def _room(self, jobs: Mapping[str, Raw]) -> str:
        """Return why a waiting gang does not fit, or else why a replica never will; '' also if we may not look."""
        waits = [each for each in jobs.values() if each["spec"].get("suspend")]
        try:
            nodes = await self._client.list(NODES, "")
            if not waits:
                return too_large(list(jobs.values()), nodes)
            pods = await self._client.list(PODS, "", "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed")
        except ApiError as error:
            if error.status != 403:
                raise
            return ""
        return lacking(waits, nodes, pods)

    async def _collect(self, key: Key, body: Raw, job: TrainingJob | None, plan: Plan, known: _Known) -> None:
        jobs = {role: each for role, each in self._informers.jobs_of(key).items() if role in plan.collect}
        if job is not None:
            topology = names.cluster_topology(job)
            found = replicas_of(topology, jobs, self._informers.pods_of(key))
            chosen = [each for each in found if each.task.role in plan.collect]
            restarts = int((body.get("status") or {}).get("restarts") or 0)
            whole = restarts if policy_of(job.spec, topology).restart == "all" else 0
            await self._evidence.keep(job, known.uid, chosen, whole, datetime.now(UTC))
        known.collected |= {each["metadata"]["uid"] for each in jobs.values()}

    async def _delete(self, body: Raw) -> None:
        if body.get("kind") == KIND:
            await self._actor.delete(body)
        elif "containers" in body["spec"]:
            # The pod stays in the informer store until the watch tells that it is gone, with all its processes.
            metadata = body["metadata"]
            await self._client.delete(PODS, metadata["namespace"], metadata["name"], metadata["uid"])
        else:
            await self._actor.delete(_of_kind(body, "Job"))
            log.info("freed", extra=fields(job=body["metadata"]["name"]))


def _of_kind(body: Raw, kind: str) -> dict[str, Any]:
    """Return the body with apiVersion and kind, which the items of a list lack."""
    return {**body, "apiVersion": BY_KIND[kind].api_version, "kind": kind}
