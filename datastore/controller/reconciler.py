"""The loop around the core: observe, decide, act, again. Everything that waits is awaited; nothing is remembered that
a restart could not find out again, but for when to try what once more.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from datastore.api.datastore import API_VERSION, KIND
from datastore.api.names import FINALIZER, volume_name
from datastore.controller import classes, deleting, desired
from datastore.controller.cache import Cache, Key
from datastore.controller.claimprobe import ClaimProbe
from datastore.controller.classes import Meant, SecretRef
from datastore.controller.cluster import (
    BY_KIND,
    CLAIMS,
    DATASTORES,
    NAMESPACES,
    VOLUMES,
    ApiError,
    Cluster,
)
from datastore.controller.conditions import Event
from datastore.controller.decide import Facts, Observed, Plan, decide
from datastore.controller.deleting import Farewell, Going, farewell
from datastore.controller.looking import Looking
from datastore.controller.metrics import BACKEND_FAILURES
from datastore.controller.mistakes import Mistake, reason_of
from datastore.controller.pods import UsingPods
from datastore.controller.recorder import Recorder
from datastore.controller.secretwatch import Uses
from datastore.controller.settings import Settings
from datastore.errors import DatastoreError
from datastore.logs import fields

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

STEPS_MAX = 12
"""Looks at one Datastore before others have their turn: what needs more is edited faster than it is repaired."""
PATIENCE_S = 3.0
"""A claim that is being deleted for longer has users, who are worth a request and a status."""
DOUBT_S = 10.0
"""A deletion that takes longer is not left to the watch alone."""
SETTLE_S = 1.0
"""Until another look at what waits for the cluster (binding, pods): its events wake us sooner."""


@dataclass(slots=True)
class Known:
    """What is remembered of one. failures: in a row; renewals: changes of its Secret; the others: monotonic times."""

    uid: str
    spec: object = None
    facts: Facts | None = None
    failures: int = 0
    look_at: float = 0.0
    failing_since: float = 0.0
    renewals: int = 0
    parting_since: float = 0.0


class Reconciler:
    """Works on one Datastore at a time per key; many keys at once."""

    def __init__(self, cluster: Cluster, cache: Cache, settings: Settings, uses: Uses) -> None:
        self._cluster = cluster
        self._cache = cache
        self._settings = settings
        self._uses = uses
        self._looking = Looking(cluster, settings)
        self._probe = ClaimProbe(cluster, settings)
        self._recorder = Recorder(cluster, settings.identity)
        self._using = UsingPods(cluster)
        self._known: dict[Key, Known] = {}

    async def close(self) -> None:
        """Release threads and connections."""
        await self._looking.close()

    def reasons(self) -> Counter[str]:
        """How many Datastores there are, by the reason of their Ready condition."""
        counted: Counter[str] = Counter()
        for body in self._cache.datastores.values():
            conditions = (body.get("status") or {}).get("conditions") or []
            counted[next((each["reason"] for each in conditions if each["type"] == "Ready"), "New")] += 1
        return counted

    def renewed(self, secret: SecretRef) -> frozenset[Key]:
        """A Secret came or changed: whoever uses it wants to be looked at now."""
        self._looking.forget_secret(secret)
        keys = self._uses.of(secret)
        for known in (self._known[key] for key in keys if key in self._known):
            known.look_at, known.failures = 0.0, 0
            known.renewals += 1
        return keys

    async def reconcile(self, key: Key) -> float | None:
        """Bring one Datastore as far as it goes now; seconds until it wants to be looked at again, None: never."""
        for _ in range(STEPS_MAX):
            body = self._cache.datastores.get(key)
            if body is None:
                return await self._gone(key)
            if "deletionTimestamp" in body["metadata"]:
                wait = await self._part(key, body)
            else:
                wait = await self._keep(key, body)
            if wait is not None:
                return wait if wait >= 0 else None
        return SETTLE_S

    # -- a Datastore that stays

    async def _keep(self, key: Key, body: Raw) -> float | None:
        """One step; None: another follows at once, negative: nothing to wait for."""
        known = self._remembered(key, body)
        meant, mistake = self._meant(body)
        self._uses.put(key, meant.secret if meant else None)
        if known.spec != meant:
            known.spec, known.facts, known.look_at, known.failures = meant, None, 0.0, 0
        if mistake is not None:
            known.facts = Facts(error=mistake)
        elif known.facts is not None and time.monotonic() >= known.look_at:
            known.facts = None
        plan = decide(self._observed(key, body, meant, known.facts))
        if plan.look and meant is not None:
            await self._look(known, meant)
            return None
        await self._act(key, body, plan)
        if plan.again:
            return None
        if plan.soon:
            return SETTLE_S
        if mistake is not None and mistake.permanent:
            return -1.0
        if plan.ready and meant is not None and await self._learn(key, body, meant, known):
            return None
        return max(known.look_at - time.monotonic(), SETTLE_S)

    async def _learn(self, key: Key, body: Raw, meant: Meant, known: Known) -> bool:
        """Count what is stored, or try the volume of another driver; whether there is something new to tell."""
        assert known.facts is not None, "what is Ready was looked at"
        if meant.spec.claim is None:
            if known.facts.measured is not None:
                return False
            known.facts = replace(known.facts, measured=await self._looking.count(meant), measured_at=_now())
            return known.facts.measured is not None
        status = (self._cache.datastores.get(key) or body).get("status") or {}
        tried = await self._probe.step(meant, self._claim(key, meant), status)
        if tried.event is not None:
            await self._recorder.record(body, tried.event)
        if tried.wait_s is not None:
            known.look_at = min(known.look_at, time.monotonic() + tried.wait_s)
        if tried.capabilities is None:
            return False
        known.facts = Facts(capabilities=tried.capabilities, measured=tried.measured, measured_at=_now())
        return True

    async def _look(self, known: Known, meant: Meant) -> None:
        renewals = known.renewals
        facts = await self._looking.look(meant)
        known.facts = facts
        if facts.error is None:
            known.failures, wait_s = 0, self._settings.check_s
        else:
            BACKEND_FAILURES.labels(reason_of(facts.error)).inc()
            wait_s = self._delay(known.failures)
            known.failures += 1
        if known.renewals != renewals:
            # The keys changed while the old ones were tried.
            wait_s = 0.0
        known.look_at = time.monotonic() + wait_s * random.uniform(0.9, 1.1)  # noqa: S311  (spreads, hides nothing)

    def _delay(self, failures: int) -> float:
        return min(self._settings.first_retry_s * 2.0 ** min(failures, 16), self._settings.retry_ceiling_s)

    async def _act(self, key: Key, body: Raw, plan: Plan) -> None:
        if plan.finalizer:
            await self._finalizer(body, present=True)
        if plan.unless_claimed is not None and await self._was_missed(plan.unless_claimed):
            return
        for wanted in plan.apply:
            self._take(await self._cluster.apply(wanted))
        if plan.replace is not None:
            await self._replace(plan.replace)
        await self._tell(key, body, plan.status, plan.events)

    async def _was_missed(self, wanted: Raw) -> bool:
        """Whether a claim that the cache does not know turns out to exist: it may be someone else's."""
        metadata = wanted["metadata"]
        found = await self._cluster.get(CLAIMS, metadata["namespace"], metadata["name"])
        if found is not None:
            self._take(found)
        return found is not None

    async def _replace(self, wanted: Raw) -> None:
        """Remove a volume and make it anew. The data is not touched: our volumes are all Retain."""
        name = wanted["metadata"]["name"]
        here = self._cache.volumes.get(("", name))
        if here is not None:
            uid = here["metadata"]["uid"]
            await self._cluster.delete(VOLUMES, "", name, uid)
            # Kubernetes keeps a volume while its claim is bound, and that is what it shall stay.
            await self._cluster.unprotect(VOLUMES, "", name, uid)
            self._cache.volumes.drop(("", name), uid)
        self._take(await self._cluster.apply(wanted))

    # -- a Datastore that goes

    async def _part(self, key: Key, body: Raw) -> float | None:
        known = self._remembered(key, body)
        known.parting_since = known.parting_since or time.monotonic()
        meant, _ = self._meant(body)
        claim = self._claim(key, meant)
        volume = self._cache.volumes.get(("", volume_name(body["metadata"]["uid"])))
        going = Going(datastore=body, meant=meant, claim=claim, volume=volume, now=_now())
        step = farewell(going)
        held = claim["metadata"]["name"] if claim is not None and "deletionTimestamp" in claim["metadata"] else ""
        if step.list_pods and claim is not None and held and _age_s(claim) < PATIENCE_S:
            # Mostly nobody uses it, and its event comes at once.
            return SETTLE_S
        if step.list_pods:
            going = replace(going, pods=await self._using.of(key[0], held, key[1], known.parting_since))
            step = farewell(going)
        failure: DatastoreError | None = None
        if step.release is not None and meant is not None:
            if claim is None and await self._has_claim(key):
                return None
            await self._tell(key, body, step.status, ())
            body = self._cache.datastores.get(key) or body
            step, failure = await self._release(known, replace(going, datastore=body), meant, step)
        for each in step.delete:
            await self._delete(each)
        await self._tell(key, body, step.status, step.events)
        if step.finish:
            await self._finalizer(body, present=False)
            self._looking.forget(body["metadata"]["uid"])
            self._uses.put(key, None)
            return -1.0
        if failure is not None:
            known.failures += 1
            return self._delay(known.failures)
        if step.status and _age_s(body) > DOUBT_S:
            await self._verify(claim, volume)
        return None if step.again else SETTLE_S * 2 if step.status else -1.0

    async def _release(
        self, known: Known, going: Going, meant: Meant, step: Farewell
    ) -> tuple[Farewell, DatastoreError | None]:
        assert step.release is not None, "the caller looked"
        try:
            released = await self._looking.release(meant, step.release)
        except DatastoreError as error:
            now = time.monotonic()
            known.failing_since = known.failing_since or now
            tried_s = now - known.failing_since
            abandoned = tried_s >= self._settings.abandon_s and await self._namespace_goes(meant.namespace)
            failed = farewell(replace(going, failure=error, abandoned=abandoned))
            return replace(failed, release=None), error
        if released.done:
            log.info("released", extra=fields(datastore=f"{meant.namespace}/{meant.name}", what=released.message))
            return farewell(replace(going, released=released.message)), None
        return replace(farewell(replace(going, progress=released.message)), release=None), None

    async def _has_claim(self, key: Key) -> bool:
        """The last look before data is removed: the API server's word, not the cache's."""
        claim = await self._cluster.get(CLAIMS, *key)
        if claim is not None:
            self._take(claim)
        return claim is not None

    async def _namespace_goes(self, namespace: str) -> bool:
        body = await self._cluster.get(NAMESPACES, "", namespace)
        return body is None or "deletionTimestamp" in body["metadata"]

    async def _gone(self, key: Key) -> float | None:
        """No Datastore has this key: volumes of an earlier one go too, once that is sure."""
        known = self._known.pop(key, None)
        self._uses.put(key, None)
        if known is not None:
            self._looking.forget(known.uid)
        left = [
            each
            for each in self._cache.volumes.values()
            if desired.owner_of(each) == key and deleting.orphans(each, None)
        ]
        if not left:
            return None
        body = await self._cluster.get(DATASTORES, *key)
        if body is not None:
            self._cache.datastores.put(body)
            return SETTLE_S
        for each in left:
            metadata = each["metadata"]
            log.info("removing a volume that has outlived its Datastore", extra=fields(volume=metadata["name"]))
            await self._delete(each)
        return None

    # -- shared

    def _remembered(self, key: Key, body: Raw) -> Known:
        known = self._known.get(key)
        if known is None or known.uid != body["metadata"]["uid"]:
            known = self._known[key] = Known(uid=body["metadata"]["uid"])
        return known

    def _meant(self, body: Raw) -> tuple[Meant | None, Mistake | None]:
        name = body["spec"].get("storageClassName") if isinstance(body.get("spec"), dict) else None
        try:
            return classes.meant(body, self._cache.classes.get(("", name)) if name else None, self._settings), None
        except Mistake as mistake:
            return None, mistake

    def _observed(self, key: Key, body: Raw, meant: Meant | None, facts: Facts | None) -> Observed:
        claim = self._claim(key, meant)
        return Observed(
            datastore=body,
            meant=meant,
            facts=facts,
            claim=claim,
            storage_class=self._cache.class_of(claim),
            volume=self._cache.volumes.get(("", volume_name(body["metadata"]["uid"]))),
            now=_now(),
        )

    def _claim(self, key: Key, meant: Meant | None) -> Raw | None:
        existing = meant.spec.claim.name if meant is not None and meant.spec.claim else None
        return self._cache.claims.get((key[0], existing) if existing else key)

    async def _tell(self, key: Key, body: Raw, status: Mapping[str, Any], events: Sequence[Event]) -> None:
        """Write the status if it says something new, then the Events: what they tell is true by then."""
        if status and status != body.get("status"):
            metadata = {name: body["metadata"][name] for name in ("name", "namespace", "uid")}
            written = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
            self._take(await self._cluster.apply(written, "status"))
        for event in events:
            await self._recorder.record(body, event)

    async def _finalizer(self, body: Raw, *, present: bool) -> None:
        """Put ours on or take it off. With the uid in it, a Datastore that is gone is not made anew by it."""
        metadata: dict[str, Any] = {name: body["metadata"][name] for name in ("name", "namespace", "uid")}
        if present:
            metadata["finalizers"] = [FINALIZER]
        try:
            written = await self._cluster.apply({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata})
        except ApiError as error:
            if present or error.status not in (404, 409):
                raise
            return
        self._take(written)

    async def _verify(self, *bodies: Raw | None) -> None:
        """Ask the API server for what the cache believes to be there."""
        for body in bodies:
            if body is None:
                continue
            metadata, resource = body["metadata"], BY_KIND[body["kind"]]
            namespace = metadata.get("namespace", "")
            found = await self._cluster.get(resource, namespace, metadata["name"])
            if found is None:
                self._shelf(body).drop((namespace, metadata["name"]), metadata["uid"])
            else:
                self._take(found)

    async def _delete(self, body: Raw) -> None:
        metadata, resource = body["metadata"], BY_KIND[body["kind"]]
        namespace = metadata.get("namespace", "")
        left = await self._cluster.delete(resource, namespace, metadata["name"], metadata["uid"])
        if left is None:
            self._shelf(body).drop((namespace, metadata["name"]), metadata["uid"])
        else:
            self._take(left)

    def _take(self, body: Raw) -> None:
        self._shelf(body).put(body)

    def _shelf(self, body: Raw) -> Any:
        shelves = {"PersistentVolumeClaim": self._cache.claims, "PersistentVolume": self._cache.volumes}
        return shelves.get(body["kind"], self._cache.datastores)


def _age_s(body: Raw) -> float:
    """For how long an object has been going."""
    since = datetime.fromisoformat(body["metadata"]["deletionTimestamp"])
    return (datetime.now(UTC) - since).total_seconds()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
