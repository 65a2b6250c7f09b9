"""Puts the controller together and runs it: kopf's watches, the queue, the workers, the heartbeat, the endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import kopf

from datastore.controller.cache import Cache, Key
from datastore.controller.classes import SecretRef
from datastore.controller.cluster import PEERINGS, ApiError, Cluster, Unavailable
from datastore.controller.handlers import Watches, operator_settings, registry
from datastore.controller.heartbeat import Heartbeat
from datastore.controller.metrics import ACTIVE, DATASTORES, QUEUED, RECONCILE_SECONDS, RECONCILES
from datastore.controller.plainclaims import PlainClaims
from datastore.controller.reconciler import Reconciler
from datastore.controller.recorder import Recorder
from datastore.controller.rotation import Announcer
from datastore.controller.secretwatch import SecretWatch, Uses
from datastore.controller.serving import Serving
from datastore.controller.settings import Settings
from datastore.controller.workqueue import WorkQueue
from datastore.logs import Limiter, fields

log = logging.getLogger(__name__)
START_S = 60.0
"""Until the first echo of the heartbeat; then its own limit holds."""


class Operator:
    """The whole controller in one event loop. Use run()."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cluster = Cluster()
        self._cache = Cache()
        self._heartbeat = Heartbeat(self._cluster, settings)
        self._uses = Uses()
        self._reconciler = Reconciler(self._cluster, self._cache, settings, self._uses)
        self._announcer = Announcer(self._cluster, self._uses)
        self._plain = PlainClaims(self._cluster, self._cache, Recorder(self._cluster, settings.identity))
        self._datastores = WorkQueue[Key]()
        self._claims = WorkQueue[Key]()
        self._failures: dict[Key, int] = {}
        self._limiter = Limiter()
        self._started = time.monotonic()
        self._standby = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, or until kopf gives up."""
        serving = Serving(self._alive, self._ready, self._refresh)
        port = await serving.start("0.0.0.0", self._settings.port)  # noqa: S104  (the kubelet probes from outside)
        log.info("serving", extra=fields(port=port, identity=self._settings.identity))
        serves = self._settings.serves
        watches = Watches(self._cache, self._heartbeat, self._datastores.add, self._claims.add, serves)
        workers = [asyncio.create_task(self._work()) for _ in range(self._settings.workers)]
        workers += [asyncio.create_task(self._provision()), asyncio.create_task(self._beat())]
        workers += self._watch_secrets()
        try:
            await self._meet(stop)
            await kopf.operator(
                registry=registry(watches),
                settings=operator_settings(self._settings),
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.watched_namespaces,
                peering_name=self._settings.peering or None,
                standalone=not self._settings.peering,
                priority=self._settings.priority,
                identity=self._settings.identity,  # type: ignore[arg-type]
                stop_flag=stop,
            )
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self._reconciler.close()
            await serving.close()
            await self._cluster.close()

    def _watch_secrets(self) -> list[asyncio.Task[None]]:
        if not self._settings.watch_secrets:
            return []
        watch = SecretWatch(self._cluster, self._uses, self._heartbeat.active, self._secret_changed)
        watched = self._settings.watched_namespaces or ("",)
        tasks = [asyncio.create_task(watch.run(namespace)) for namespace in watched]
        return [*tasks, asyncio.create_task(self._announcer.run())]

    def _secret_changed(self, secret: SecretRef, version: str, rotated: bool) -> None:
        for key in self._reconciler.renewed(secret):
            self._datastores.add(key)
        if rotated:
            self._announcer.rotated(secret, version)

    async def _meet(self, stop: asyncio.Event) -> None:
        """Make the object of the peering, so that one `kubectl apply` can bring its definition and ourselves.

        Right after that the definition may not be served yet. After START_S kopf says what is missing.
        """
        body = {
            "apiVersion": PEERINGS.api_version,
            "kind": "ClusterKopfPeering",
            "metadata": {"name": self._settings.peering},
        }
        missing = bool(self._settings.peering) and not self._settings.namespaces
        while missing and not stop.is_set() and time.monotonic() - self._started < START_S:
            try:
                await self._cluster.apply(body)
                missing = False
            except (ApiError, Unavailable) as error:
                log.warning("the peering will be tried again", extra=fields(error=error))
                await asyncio.sleep(1.0)

    async def _work(self) -> None:
        while True:
            key = await self._datastores.get()
            try:
                await self._active()
                await self._one(key)
            finally:
                self._datastores.done(key)

    async def _one(self, key: Key) -> None:
        started = time.monotonic()
        try:
            wait_s = await self._reconciler.reconcile(key)
        except (ApiError, Unavailable) as error:
            wait_s = self._again(key, error, "refused")
        except Exception as error:
            # One Datastore that we can't handle must not stop the others; it is logged with its traceback.
            log.exception("a Datastore could not be worked on", extra=fields(datastore="/".join(key)))
            wait_s = self._again(key, error, "failed")
        else:
            self._failures.pop(key, None)
            RECONCILES.labels("done").inc()
        RECONCILE_SECONDS.observe(time.monotonic() - started)
        if wait_s is not None:
            self._datastores.add_after(key, wait_s)

    def _again(self, key: Key, error: Exception, outcome: str) -> float:
        RECONCILES.labels(outcome).inc()
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        if self._limiter.allows(str(error), time.monotonic()):
            log.warning("will be tried again", extra=fields(datastore="/".join(key), error=error))
        if isinstance(error, ApiError) and error.status == 409:
            # Someone else wrote first; the watch shows what.
            return 0.1
        return min(self._settings.first_retry_s * 2.0 ** min(failures, 16), self._settings.retry_ceiling_s)

    async def _provision(self) -> None:
        while True:
            key = await self._claims.get()
            try:
                await self._active()
                await self._plain.provision(key)
            except (ApiError, Unavailable) as error:
                log.warning("the claim will be tried again", extra=fields(claim="/".join(key), error=error))
                self._claims.add_after(key, self._settings.first_retry_s)
            finally:
                self._claims.done(key)

    async def _active(self) -> None:
        """Wait until the watch is known to live and to be ours."""
        while not self._heartbeat.active():
            await asyncio.sleep(0.1)

    async def _beat(self) -> None:
        """Renew the heartbeat. A replica in waiting sees no echo, and writes all the same: it is alive."""
        while True:
            with suppress(ApiError, Unavailable):
                await self._heartbeat.write()
            starting = not self._heartbeat.active() and time.monotonic() - self._started < START_S
            await asyncio.sleep(min(1.0, self._settings.heartbeat_s) if starting else self._settings.heartbeat_s)

    def _alive(self) -> bool:
        if time.monotonic() - self._started < START_S or self._heartbeat.active():
            return True
        # In waiting for other replicas, there is no echo to be had: the API server's answers must do.
        return bool(self._settings.peering) and self._heartbeat.answered()

    def _ready(self) -> bool:
        return self._heartbeat.active() or (bool(self._settings.peering) and self._heartbeat.answered())

    def _refresh(self) -> None:
        QUEUED.set(len(self._datastores))
        ACTIVE.set(1 if self._heartbeat.active() else 0)
        DATASTORES.clear()
        for reason, count in self._reconciler.reasons().items():
            DATASTORES.labels(reason).set(count)
