"""Leader election: one replica works at a time, the one that holds a Lease, while it can prove that it does.

The rules and the times are client-go's (k8s.io/client-go/tools/leaderelection): the holder renews every RETRY_S and
stops when it could not for RENEW_S; the others take the Lease when it was not renewed for LEASE_S by their own clock,
so that clocks need not agree. Since RENEW_S < LEASE_S, the holder has stopped before another replica begins, even if
the holder was paused: check() counts from the time at which the last successful renewal was begun.

The Lease is watched too, and its renewals have to come back by the watch, which proves that the watch is alive: a
replica that works with a dead watch and looks healthy is worse than none. Only the event loop may call this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from datastore.api.resources import LEASES
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.metrics import LAST_ECHO, LEADING
from datastore.logs import Limiter, fields

log = logging.getLogger(__name__)

LEASE_S = 15.0
RENEW_S = 10.0
RETRY_S = 2.0
REQUEST_S = 4.0
"""Deadline of a request about the Lease: after one that times out, the next is still sent before RENEW_S is over."""
ECHO_S = 45.0
"""Seconds in which the watch has to show some replica's renewal of the Lease; kopf may need time to restart it."""


class LeaseLost(Exception):
    """This replica does not hold the Lease any more, so another one may be at work."""


def now_s() -> float:
    """Return monotonic seconds that count also while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election:
    """A candidate for the Lease `name` of a namespace. client: unfenced, for this alone, with REQUEST_S as deadline."""

    def __init__(
        self, client: Client, namespace: str, name: str, identity: str, clock: Callable[[], float] = now_s
    ) -> None:
        self.name = name
        self.namespace = namespace
        self._client = client
        self._identity = identity
        self._clock = clock
        self._held_until = float("-inf")
        self._observed = ""
        """The resourceVersion of the Lease as last seen; _observed_at: since when."""
        self._observed_at = float("-inf")
        self._answered_at = float("-inf")
        self._echoed_at = float("-inf")
        self._limiter = Limiter()

    def leading(self) -> bool:
        """Whether this replica holds the Lease, and its watch is alive."""
        now = self._clock()
        return now < self._held_until and now - self._echoed_at < ECHO_S

    def check(self) -> None:
        """The fence of every request that changes something. Errors: LeaseLost when the Lease is not held any more."""
        if self._clock() >= self._held_until:
            raise LeaseLost(f"the Lease {self.namespace}/{self.name} could not be renewed in time")

    def alive(self, since: float) -> bool:
        """Whether API server and watch each gave a sign of life in the last ECHO_S; `since`, our start, counts too."""
        now = self._clock()
        newest = max(since, self._answered_at), max(since, self._echoed_at)
        return all(now - each < ECHO_S for each in newest)

    def ready(self) -> bool:
        """Whether this replica could work now if it led: the API server and the watch gave a sign of life in ECHO_S."""
        now = self._clock()
        return now - self._answered_at < ECHO_S and now - self._echoed_at < ECHO_S

    def echoed(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the Lease's watch."""
        metadata = event["object"]["metadata"]
        if (metadata["namespace"], metadata["name"]) == (self.namespace, self.name):
            self._echoed_at = self._clock()
            LAST_ECHO.set_to_current_time()

    async def run(self) -> None:
        """Hold the Lease, or wait for it, forever."""
        while True:
            try:
                await self._step()
            except (ApiError, Unavailable) as error:
                if isinstance(error, ApiError) and error.status == 409:
                    pass  # another candidate was faster; the next step sees it
                elif self._limiter.allows(str(error), time.monotonic()):
                    log.warning("the Lease could not be renewed", extra=fields(lease=self.name, error=error))
            LEADING.set(1 if self.leading() else 0)
            await asyncio.sleep(RETRY_S)

    async def release(self) -> None:
        """Give the Lease back when this process ends, so that another replica takes over at once."""
        if self._clock() >= self._held_until:
            return
        self._held_until = float("-inf")
        try:
            lease = await self._client.get(LEASES, self.namespace, self.name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                await self._client.update(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except (ApiError, Unavailable) as error:
            log.info("the Lease was not given back", extra=fields(lease=self.name, error=error))

    async def _step(self) -> None:
        sent = self._clock()
        lease = await self._client.get(LEASES, self.namespace, self.name)
        self._answered_at = self._clock()
        if lease is None:
            body = {"metadata": {"name": self.name, "namespace": self.namespace}, "spec": self._spec({})}
            await self._client.create(LEASES, self.namespace, _lease(body))
            self._won(sent)
            return
        spec = lease.get("spec") or {}
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._observed:
            self._observed, self._observed_at = version, self._clock()
        holder = spec.get("holderIdentity") or ""
        term_s = float(spec.get("leaseDurationSeconds") or LEASE_S)
        if holder not in ("", self._identity) and self._clock() < self._observed_at + term_s:
            return
        # The body has the resourceVersion, so that one of two candidates is refused (409).
        await self._client.update(LEASES, _lease({**lease, "spec": self._spec(spec)}))
        self._won(sent)

    def _won(self, sent: float) -> None:
        if self._clock() >= self._held_until:
            log.info("this replica works now", extra=fields(lease=self.name, identity=self._identity))
        self._held_until = sent + RENEW_S

    def _spec(self, before: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_S),
            "acquireTime": before.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if same else 1),
        }


def _lease(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": LEASES.api_version, "kind": "Lease", **body}
