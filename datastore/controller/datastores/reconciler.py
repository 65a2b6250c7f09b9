"""The reconcile loop: observe, decide (decide.py, deletion.py), act, and again. A restart loses only retry times.

Work on the storage runs in a task beside this loop, at most one per Datastore; when it ends, the Datastore is queued.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from datastore.api.names import volume_name
from datastore.api.objects import condition, timestamp
from datastore.api.resources import CLAIMS, VOLUMES
from datastore.backends.base import Policy, Released
from datastore.controller.datastores import deletion, desired
from datastore.controller.datastores.claimprobe import ClaimProbe
from datastore.controller.datastores.decide import Facts, Observed, Plan, believed, claim_refused, decide
from datastore.controller.datastores.deletion import DeletionState, plan_deletion
from datastore.controller.datastores.effective import EffectiveSpec, SecretRef, effective_spec
from datastore.controller.datastores.informers import Informers
from datastore.controller.datastores.metrics import BACKEND_FAILURES
from datastore.controller.datastores.pods import UsingPods
from datastore.controller.datastores.prober import BackendProber, failure_of
from datastore.controller.datastores.secretwatch import Uses
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.actor import Actor
from datastore.controller.runtime.client import ApiError, Client, Fence, Unavailable
from datastore.controller.runtime.election import LeaseLost
from datastore.controller.runtime.informers import key_of
from datastore.controller.runtime.mistakes import Mistake, reason_of
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.recorder import Recorder
from datastore.errors import DatastoreError, ServerStarting
from datastore.logs import fields

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

STEPS_MAX = 12
"""Steps for one Datastore before others have their turn; one that needs more is edited faster than we repair it."""
PATIENCE_S = 3.0
"""A claim that is being deleted for longer is probably in use; then its pods are listed and named in the status."""
STARTING_S = 5.0
"""The most seconds between checks of a server that was made for a Datastore and is starting."""
DOUBT_S = 10.0
"""After this time a deletion also reads claim and volume from the API server, not only from the watch."""
SETTLE_S = 1.0
"""Seconds until the next step when waiting for Kubernetes (binding, pods), unless a watch event comes earlier."""
NOW_S = 0.0
NEVER = None
AGAIN = -1.0
"""The result of a step when another step has to follow at once."""


@dataclass(slots=True)
class Known:
    """What is remembered of one Datastore. Times are monotonic.

    facts: what was found out for the present spec; look_at: when to look or release again; work: the task that works on
    the storage; released: the result or the error of the last release; failures: how many looks or releases failed in a
    row; renewals: how often the Secret, the clients (the cluster's nodes) or the claim of its NFS server have changed;
    without_claim: that claim is gone, or is being deleted.
    """

    uid: str
    spec: EffectiveSpec | None = None
    facts: Facts | None = None
    work: asyncio.Task[None] | None = None
    released: Released | DatastoreError | None = None
    failures: int = 0
    look_at: float = 0.0
    failing_since: float = 0.0
    renewals: int = 0
    without_claim: bool = False
    deleting_since: float = 0.0

    def renew(self) -> None:
        """Make a check due at once, and another one if one is under way."""
        self.look_at, self.failures = 0.0, 0
        self.renewals += 1


class Reconciler:
    """Reconciles Datastores: many at once, each by one worker at a time. nodes: see Opening; wake: queues a key."""

    def __init__(
        self,
        client: Client,
        recorder: Recorder,
        informers: Informers,
        settings: Settings,
        uses: Uses,
        nodes: Callable[[], Sequence[str]],
        *,
        wake: Callable[[Key], None],
        fence: Fence,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._informers = informers
        self._settings = settings
        self._uses = uses
        self._wake = wake
        self._fence = fence
        self._actor = Actor(client, recorder, informers.stores)
        self._prober = BackendProber(client, settings, nodes)
        self._claim_probe = ClaimProbe(client, settings)
        self._using = UsingPods(client)
        self._known: dict[Key, Known] = {}

    def close(self) -> None:
        """Release threads and connections; work on the storage ends by its own deadlines."""
        for known in self._known.values():
            if known.work is not None:
                known.work.cancel()
        self._prober.close()

    def reasons(self) -> Counter[str]:
        """How many Datastores there are, by the reason of their Ready condition."""
        return Counter(condition(each, "Ready").get("reason", "New") for each in self._informers.datastores.values())

    def renewed(self, secret: SecretRef) -> frozenset[Key]:
        """Make the Datastores that use this created, changed or deleted Secret due for a check; return their keys."""
        self._prober.forget_secret(secret)
        keys = self._uses.of(secret)
        for known in (self._known[key] for key in keys if key in self._known):
            known.renew()
        return keys

    def nodes_changed(self) -> list[Key]:
        """Make the Datastores whose clients are the cluster's nodes due for a check; return their keys."""
        keys = []
        for key, known in self._known.items():
            if known.spec is not None and known.spec.kind.needs_nodes(known.spec.parameters):
                known.renew()
                keys.append(key)
        return keys

    async def reconcile(self, key: Key) -> float | None:
        """Bring one Datastore as far as possible now; return seconds until its next turn, None to wait for an event."""
        for _ in range(STEPS_MAX):
            body = self._informers.datastores.get(key)
            if body is None:
                return await self._gone(key)
            known = self._remembered(key, body)
            step = self._delete_step if "deletionTimestamp" in body["metadata"] else self._step
            wait_s = await step(key, body, known)
            if wait_s is None or wait_s >= 0:
                return wait_s
        return SETTLE_S

    # -- a Datastore that is not being deleted

    async def _step(self, key: Key, body: Raw, known: Known) -> float | None:
        effective, mistake = self._effective(body)
        self._uses.put(key, effective.secret if effective else None)
        if known.spec != effective:
            known.spec, known.facts, known.look_at, known.failures = effective, None, 0.0, 0
        if mistake is not None:
            known.facts = Facts(error=mistake)
        without_claim = effective is not None and self._without_claim(effective)
        if without_claim and not known.without_claim:
            known.renew()
        known.without_claim = without_claim
        observed = self._observed(key, body, effective, known.facts)
        plan = decide(observed)
        now = time.monotonic()
        due = mistake is None and now >= known.look_at and (plan.look or known.facts is not None)
        if effective is not None and due:
            self._beside(key, known, self._look(known, effective, made=self._made(body)))
        if plan.look:
            return NEVER if known.work is not None else max(known.look_at - now, SETTLE_S)
        try:
            await self._act(body, plan)
        except ApiError as error:
            makes_claim = observed.claim is None and any(each["kind"] == "PersistentVolumeClaim" for each in plan.apply)
            if makes_claim and error.refusal:
                told = claim_refused(observed, error)
                await self._actor.tell(body, told.status, told.events)
            raise
        if plan.again:
            return AGAIN
        if plan.soon:
            return SETTLE_S
        if mistake is not None and mistake.permanent:
            return NEVER
        if plan.ready and effective is not None and await self._learn(key, body, effective, known):
            return AGAIN
        return max(known.look_at - time.monotonic(), SETTLE_S)

    def _beside(self, key: Key, known: Known, work: Coroutine[Any, Any, None]) -> None:
        """Run work on the storage as a task, unless one runs for this Datastore; wake the Datastore when it ends."""
        if known.work is not None:
            work.close()
            return

        async def run() -> None:
            try:
                await work
            except LeaseLost:
                log.info("work on the storage was left to another replica", extra=fields(datastore="/".join(key)))
            except Unavailable as error:
                # This says nothing about the storage, so the facts stay as they are.
                log.info("the check of a storage is put off", extra=fields(datastore="/".join(key), reason=error))
                known.look_at = time.monotonic() + self._settings.retry_after(known.failures)
                known.failures += 1
            finally:
                known.work = None
                self._wake(key)

        known.work = asyncio.create_task(run())

    async def _look(self, known: Known, effective: EffectiveSpec, *, made: bool) -> None:
        renewals = known.renewals
        facts = await self._prober.look(effective, self._fence, made=made)
        if known.spec != effective:
            return  # it was edited during the check, and another check follows
        known.facts = believed(known.facts, facts, known.failures, exported=effective.kind.exported)
        if facts.error is None:
            known.failures, wait_s = 0, self._settings.check_s
        else:
            BACKEND_FAILURES.labels(reason_of(facts.error)).inc()
            wait_s = self._settings.retry_after(known.failures)
            if isinstance(facts.error, ServerStarting):
                wait_s = min(wait_s, STARTING_S)
            known.failures += 1
        if known.renewals != renewals:
            # The keys or the clients changed while the old ones were being used.
            wait_s = NOW_S
        known.look_at = time.monotonic() + wait_s * random.uniform(0.9, 1.1)  # noqa: S311  (spreads, hides nothing)

    async def _learn(self, key: Key, body: Raw, effective: EffectiveSpec, known: Known) -> bool:
        """Count what is stored, or probe another driver's volume; return whether the status has something to add."""
        assert known.facts is not None, "what is Ready was looked at"
        if effective.kind.volume != "claim":
            if known.facts.measured is None and self._prober.may_count(effective):
                self._beside(key, known, self._count(known, effective))
            return False
        status = (self._informers.datastores.get(key) or body).get("status") or {}
        tried = await self._claim_probe.step(effective, self._claim(key, effective), status)
        if tried.event is not None:
            await self._recorder.record(body, tried.event)
        if tried.wait_s is not None:
            known.look_at = min(known.look_at, time.monotonic() + tried.wait_s)
        if tried.capabilities is None:
            return False
        known.facts = Facts(capabilities=tried.capabilities, measured=tried.measured, measured_at=timestamp())
        return True

    async def _count(self, known: Known, effective: EffectiveSpec) -> None:
        measured = await self._prober.count(effective)
        if measured is not None and known.spec == effective and known.facts is not None:
            known.facts = replace(known.facts, measured=measured, measured_at=timestamp())

    async def _act(self, body: Raw, plan: Plan) -> None:
        if plan.finalizer:
            await self._actor.finalizer(body, present=True)
        # The informer store may not know yet a claim that somebody else has made.
        if plan.unless_claimed is not None and await self._actor.look(plan.unless_claimed) is not None:
            return
        if plan.claim_status:
            claim = self._claim(key_of(body), self._known[key_of(body)].spec)
            if claim is not None:
                await self._actor.merge(CLAIMS, claim, {"status": plan.claim_status}, "status")
        for wanted in plan.apply:
            await self._actor.apply(wanted)
        if plan.replace is not None:
            await self._replace(plan.replace)
        await self._actor.tell(body, plan.status, plan.events)

    async def _replace(self, wanted: Raw) -> None:
        """Recreate a volume that somebody deleted. The data is not touched: only a Datastore's deletion does that."""
        name = wanted["metadata"]["name"]
        here = self._informers.volumes.get(("", name))
        if here is not None:
            uid = here["metadata"]["uid"]
            await self._client.delete(VOLUMES, "", name, uid)
            # By its finalizer Kubernetes keeps the volume while the claim is bound, and the claim shall stay bound.
            await self._client.merge(VOLUMES, here, {"metadata": {"finalizers": None}})
            self._informers.volumes.drop(("", name), uid)
        await self._actor.apply(wanted)

    # -- a Datastore that is being deleted

    async def _delete_step(self, key: Key, body: Raw, known: Known) -> float | None:
        if not known.deleting_since:
            known.deleting_since, known.look_at, known.failures = time.monotonic(), 0.0, 0
        effective, mistake = self._effective(body)
        state = await self._deletion_state(key, body, known, effective, mistake)
        plan = plan_deletion(state)
        claim = state.claim
        deleted = claim["metadata"]["name"] if claim is not None and "deletionTimestamp" in claim["metadata"] else ""
        if plan.list_pods and claim is not None and deleted and _age_s(claim) < PATIENCE_S:
            # Usually no pod uses the claim, and the event that it is gone comes at once.
            return SETTLE_S
        if plan.list_pods:
            pods = await self._using.of(key[0], deleted, key[1], known.deleting_since)
            plan = plan_deletion(replace(state, pods=pods))
        if plan.release is not None and claim is None and await self._client.get(CLAIMS, *key) is not None:
            # The last check before data is removed asks the API server, not the informer store.
            return SETTLE_S
        for each in plan.delete:
            await self._actor.delete(each)
        await self._actor.tell(body, plan.status, plan.events)
        if plan.finish:
            await self._actor.finalizer(body, present=False)
            self._prober.forget(body["metadata"]["uid"])
            self._uses.put(key, None)
            return NEVER
        if plan.release is not None and effective is not None:
            return self._go_on_releasing(key, known, effective, plan.release)
        if plan.status and _age_s(body) > DOUBT_S:
            for found in (claim, state.volume):
                if found is not None:
                    await self._actor.look(found)
        if plan.again:
            return AGAIN
        return SETTLE_S * 2 if plan.status else NEVER

    async def _deletion_state(
        self, key: Key, body: Raw, known: Known, effective: EffectiveSpec | None, mistake: Mistake | None
    ) -> DeletionState:
        failure = mistake or (known.released if isinstance(known.released, DatastoreError) else None)
        abandoned = False
        if failure is not None:
            known.failing_since = known.failing_since or time.monotonic()
            tried_s = time.monotonic() - known.failing_since
            abandoned = tried_s >= self._settings.abandon_s and await self._client.namespace_ends(key[0])
        done = isinstance(known.released, Released) and known.released.done
        message = known.released.message if isinstance(known.released, Released) else ""
        return DeletionState(
            datastore=body,
            effective=effective,
            claim=self._claim(key, effective),
            volume=self._informers.volumes.get(("", volume_name(body["metadata"]["uid"]))),
            progress="" if done else message,
            released=message if done else None,
            failure=failure,
            abandoned=abandoned,
            now=timestamp(),
        )

    def _go_on_releasing(self, key: Key, known: Known, effective: EffectiveSpec, policy: Policy) -> float | None:
        now = time.monotonic()
        if known.work is None and now >= known.look_at:
            self._beside(key, known, self._release(known, effective, policy))
            return NEVER
        return max(known.look_at - now, SETTLE_S)

    async def _release(self, known: Known, effective: EffectiveSpec, policy: Policy) -> None:
        try:
            released = await self._prober.release(effective, policy, self._fence)
        except (LeaseLost, Unavailable):
            raise
        except Exception as error:
            known.released = failure_of(error)
            known.look_at = time.monotonic() + self._settings.retry_after(known.failures)
            known.failures += 1
            return
        known.released, known.failures, known.failing_since, known.look_at = released, 0, 0.0, 0.0
        if released.done:
            where = f"{effective.namespace}/{effective.name}"
            log.info("released", extra=fields(datastore=where, what=released.message))

    async def _gone(self, key: Key) -> float | None:
        """Forget a key without a Datastore; delete volumes that it left, if the API server has no Datastore either."""
        known = self._known.pop(key, None)
        self._uses.put(key, None)
        if known is not None:
            self._prober.forget(known.uid)
        left = [
            each
            for each in self._informers.volumes.values()
            if desired.owner_of(each) == key and deletion.orphans(each, None)
        ]
        if not left:
            return NEVER
        if await self._actor.look(desired.reference(key)) is not None:
            return SETTLE_S
        for each in left:
            name = each["metadata"]["name"]
            log.info("removing a volume that has outlived its Datastore", extra=fields(volume=name))
            await self._actor.delete(each)
        return NEVER

    # -- shared

    def _remembered(self, key: Key, body: Raw) -> Known:
        known = self._known.get(key)
        if known is None or known.uid != body["metadata"]["uid"]:
            known = self._known[key] = Known(uid=body["metadata"]["uid"])
        return known

    def _made(self, body: Raw) -> bool:
        """Whether the Datastore was provisioned before, so that its data must be there."""
        volume = self._informers.volumes.get(("", volume_name(body["metadata"]["uid"])))
        return volume is not None or bool((body.get("status") or {}).get("volumeName"))

    def _effective(self, body: Raw) -> tuple[EffectiveSpec | None, Mistake | None]:
        try:
            return effective_spec(body, self._informers.class_for(body), self._settings), None
        except Mistake as mistake:
            return None, mistake

    def _without_claim(self, effective: EffectiveSpec) -> bool:
        """Whether the claim from which an NFS server in the cluster serves the data is gone, or is being deleted."""
        key = effective.kind.claim(effective.parameters, effective.uid)
        claim = self._informers.claims.get(key) if key is not None else None
        return key is not None and (claim is None or "deletionTimestamp" in claim["metadata"])

    def _observed(self, key: Key, body: Raw, effective: EffectiveSpec | None, facts: Facts | None) -> Observed:
        claim = self._claim(key, effective)
        return Observed(
            datastore=body,
            effective=effective,
            facts=facts,
            claim=claim,
            storage_class=self._informers.class_of(claim),
            volume=self._informers.volumes.get(("", volume_name(body["metadata"]["uid"]))),
            now=timestamp(),
        )

    def _claim(self, key: Key, effective: EffectiveSpec | None) -> Raw | None:
        existing = effective.spec.claim.name if effective is not None and effective.spec.claim else None
        return self._informers.claims.get((key[0], existing) if existing else key)


def _age_s(body: Raw) -> float:
    """Return for how many seconds an object has been in deletion."""
    since = datetime.fromisoformat(body["metadata"]["deletionTimestamp"])
    return (datetime.now(UTC) - since).total_seconds()
