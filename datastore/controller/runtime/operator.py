"""The process of a controller: kopf's watches, the election, the queues with their workers, the HTTP endpoints.

A Kind (below) says which objects a controller reconciles: it brings watches, queues with the functions that reconcile
their keys, and what else runs beside them. All replicas watch, so that a new leader knows everything at once; only the
leader works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import kopf
from kopf._cogs.structs.references import Insights

from datastore.api.resources import LEASES, Resource
from datastore.controller.runtime.client import ApiError, Client, Fence, Unavailable
from datastore.controller.runtime.election import REQUEST_S, Election, LeaseLost, now_s
from datastore.controller.runtime.metrics import QUEUED, RECONCILE_SECONDS, RECONCILES
from datastore.controller.runtime.queue import Key, WorkQueue
from datastore.controller.runtime.serving import Serving
from datastore.controller.runtime.settings import RuntimeSettings
from datastore.controller.runtime.watches import Watch, operator_settings, registry
from datastore.errors import DatastoreError
from datastore.logs import Limiter, fields

log = logging.getLogger(__name__)

Reconcile = Callable[[Key], Awaitable[float | None]]
"""Brings one object as far as possible now; returns seconds until its next turn, None to wait for an event."""
CONFLICT_S = 0.1
TURN_S = 0.1
"""How soon a replica notices that it leads."""
SERVED_S = 0.5
"""Seconds between two checks for a kind that the API server does not serve yet."""


class KindMissing(DatastoreError):
    """The API server does not serve a kind that the controller watches."""

    def __init__(self, resource: Resource) -> None:
        definition = f"{resource.plural}.{resource.api_version.partition('/')[0]}"
        super().__init__(
            f"the cluster has no CustomResourceDefinition {definition}: apply the definitions with "
            "`kubectl apply -k manifests/` or `datastore crd | kubectl apply -f -`"
        )


class Kind(Protocol):
    """The controller of one kind of object. Operator makes it with a client whose writes are fenced.

    The methods after the first two do nothing unless a kind has its own.
    """

    def watches(self) -> Sequence[Watch]:
        """What is watched in every namespace that is served."""
        ...

    def queues(self) -> Sequence[tuple[WorkQueue, Reconcile]]:
        """The queues, each with the function that reconciles its keys."""
        ...

    def beside(self, leading: Callable[[], bool]) -> Sequence[Callable[[], Awaitable[None]]]:
        """Functions that run as long as the process; each asks `leading` before it changes anything."""
        return ()

    def refresh(self) -> None:
        """Set gauges. Called before metrics are read."""
        return

    async def close(self) -> None:
        """Release threads and connections."""
        return


class Operator:
    """The whole process in one event loop; call run(). name: the name of the Lease; kind: makes the Kind."""

    def __init__(self, settings: RuntimeSettings, name: str, kind: Callable[[Client, Fence], Kind]) -> None:
        self._settings = settings
        self._lease_client = Client(deadline_s=REQUEST_S)
        self._election = Election(self._lease_client, settings.namespace, name, settings.identity)
        self._client = Client(self._election.check)
        self._kind = kind(self._client, self._election.check)
        self._queues = self._kind.queues()
        self._failures: dict[Key, int] = {}
        self._limiter = Limiter()
        self._started = now_s()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, or until kopf gives up. Errors: KindMissing if that is because a kind was removed."""
        election = self._election
        serving = Serving(lambda: election.alive(self._started), election.ready, self._refresh)
        port = await serving.start("0.0.0.0", self._settings.port)  # noqa: S104  (the kubelet probes from outside)
        log.info("serving", extra=fields(port=port, identity=self._settings.identity))
        lease = Watch(resource=LEASES, tell=election.echoed, fields=f"metadata.name={election.name}")
        watches = [*self._kind.watches(), lease]
        kinds = [each.resource for each in watches]
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(election.run())]
        for queue, reconcile in self._queues:
            tasks += [asyncio.ensure_future(self._work(queue, reconcile)) for _ in range(self._settings.workers)]
        tasks += [asyncio.ensure_future(start()) for start in self._kind.beside(election.leading)]
        insights = Insights()  # kopf exports no other way to learn which kinds it found
        unwatched: list[Resource] = []

        async def end_unless_all_are_watched() -> None:
            """A kind may be removed, or another API server may not know it yet, when kopf looks for it."""
            await insights.ready_resources.wait()
            watched = {each.plural for each in insights.watched_resources}
            unwatched.extend(each for each in kinds if each.plural not in watched)
            if unwatched:
                stop.set()

        tasks.append(asyncio.ensure_future(end_unless_all_are_watched()))
        try:
            await self._until_served(kinds, stop)
            await kopf.operator(
                registry=registry(watches),
                settings=operator_settings(watches),
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.watched_namespaces,
                standalone=True,
                identity=self._settings.identity,  # type: ignore[arg-type]
                insights=insights,
                stop_flag=stop,
            )
            if unwatched:
                raise KindMissing(unwatched[0])
        except Exception:
            # kopf ends when a kind's definition is removed. The next process waits for it, and knows no old objects.
            for each in kinds:
                if isinstance(missing := await self._missing(each), KindMissing):
                    raise missing from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await election.release()
            await self._kind.close()
            await serving.close()
            await self._client.close()
            await self._lease_client.close()

    async def _until_served(self, resources: Sequence[Resource], stop: asyncio.Event) -> None:
        """Wait until the API server serves all these kinds, or for `stop`.

        kopf looks for the kinds once, when it starts, and would never watch one that came later. Until then no watch
        shows anything, so this replica is not ready, and after ECHO_S not alive.
        """
        for resource in resources:
            while not stop.is_set() and (why := await self._missing(resource)) is not None:
                if self._limiter.allows(f"{resource.plural} {why}", time.monotonic()):
                    log.warning("waits for the kinds that it watches", extra=fields(kind=resource.plural, error=why))
                await asyncio.sleep(SERVED_S)

    async def _missing(self, resource: Resource) -> Exception | None:
        """Return why a kind can't be watched: it is missing, or the API server does not tell; None if it is served."""
        try:
            return None if await self._client.serves(resource) else KindMissing(resource)
        except (ApiError, Unavailable) as error:
            return error

    async def _work(self, queue: WorkQueue, reconcile: Reconcile) -> None:
        while True:
            key = await queue.get()
            try:
                while not self._election.leading():
                    await asyncio.sleep(TURN_S)
                wait_s = await self._one(key, reconcile)
                if wait_s is not None:
                    queue.add_after(key, wait_s)
            finally:
                queue.done(key)

    async def _one(self, key: Key, reconcile: Reconcile) -> float | None:
        started = time.monotonic()
        try:
            wait_s = await reconcile(key)
        except LeaseLost:
            # Another replica does the work; this one repeats it if it leads again.
            return 0.0
        except (ApiError, Unavailable) as error:
            wait_s = self._again(key, error, "refused")
        except Exception as error:
            # One object that we can't handle must not stop the others; it is logged with its traceback.
            log.exception("an object could not be reconciled", extra=fields(object="/".join(key)))
            wait_s = self._again(key, error, "failed")
        else:
            self._failures.pop(key, None)
            RECONCILES.labels("done").inc()
        RECONCILE_SECONDS.observe(time.monotonic() - started)
        return wait_s

    def _again(self, key: Key, error: Exception, outcome: str) -> float:
        RECONCILES.labels(outcome).inc()
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        if self._limiter.allows(str(error), time.monotonic()):
            log.warning("will be tried again", extra=fields(object="/".join(key), error=error))
        if isinstance(error, ApiError) and error.status == 409:
            # Someone else wrote first; the watch shows the change.
            return CONFLICT_S
        return self._settings.retry_after(failures)

    def _refresh(self) -> None:
        QUEUED.set(sum(len(queue) for queue, _ in self._queues))
        self._kind.refresh()
