"""Copies what the replicas of TrainingJobs use from the node plugins' reports to an object that a job's owner may read.

A node plugin reports on all pods of its node, of all tenants, in one ConfigMap of our own namespace (csi/podusage.py).
This module writes the figures of a job's own pods into the job's ConfigMap of evidence, while the job runs and for the
last time some seconds after it was freed, when its nodes have sent the last figures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ValidationError

from datastore.api.datastore import API_VERSION
from datastore.api.names import usage_name
from datastore.api.resources import CONFIGMAPS
from datastore.api.trainingjob import KIND, TrainingJob
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.election import LeaseLost
from datastore.controller.runtime.informers import key_of
from datastore.controller.runtime.queue import Key
from datastore.controller.trainingjobs import desired
from datastore.controller.trainingjobs.informers import Informers
from datastore.logs import fields
from datastore.training.cluster import names, usage
from datastore.training.cluster.replicas import index_of, time_of
from datastore.training.cluster.usage import Used

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

REFRESH_S = 10.0
LATE_S = 60.0
"""How long after a job's end its nodes may still report more."""
AT_ONCE = 4
OF_KIND = {"apiVersion": API_VERSION, "kind": KIND}
OF_CONFIGMAP = {"apiVersion": "v1", "kind": "ConfigMap"}


class UsageCollector:
    """Copies the figures, as the module says. Figures that can't be read now are left as they were."""

    def __init__(self, client: Client, informers: Informers, namespace: str) -> None:
        self._client = client
        self._informers = informers
        self._namespace = namespace
        self._newest: dict[Key, tuple[str, Used]] = {}
        """For each job that is being handled: its uid, and the figures in its ConfigMap."""
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def run(self, leading: Callable[[], bool]) -> None:
        """Refresh every REFRESH_S while this replica leads; never return."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if leading():
                await self.refresh(datetime.now(UTC))

    async def refresh(self, now: datetime) -> None:
        """Update the figures of every job that runs, or ran until lately; each node's report is read once."""
        looked = [each for each in self._informers.trainingjobs.values() if _is_looked_at(each, now)]
        self._newest = {key: self._newest[key] for key in map(key_of, looked) if key in self._newest}
        several = asyncio.Semaphore(AT_ONCE)
        told: dict[str, asyncio.Future[Raw]] = {}

        def report(node: str) -> Awaitable[Raw]:
            if node not in told:
                told[node] = asyncio.ensure_future(self._report(node))
            return told[node]

        async def one(body: Raw) -> None:
            async with several:
                try:
                    await self._refresh(body, report)
                except (ApiError, Unavailable, LeaseLost, ValidationError) as error:
                    log.info("what a TrainingJob uses is not written", extra=fields(reason=error))

        await asyncio.gather(*(one(each) for each in looked))

    def writing(self, key: Key) -> asyncio.Lock:
        """Return the lock to hold while the ConfigMap of a job is written."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def known(self, key: Key, uid: str, found: Raw | None, pods: Sequence[Raw]) -> Used:
        """Return the figures of these and earlier pods. found: the job's ConfigMap. The caller holds writing(key)."""
        before = self._newest.get(key)
        used = before[1] if before is not None and before[0] == uid else usage.parsed(found)
        used = await self._with(used, pods, self._report)
        self._newest[key] = (uid, used)
        return used

    async def _refresh(self, about: Raw, report: Callable[[str], Awaitable[Raw]]) -> None:
        key, uid = key_of(about), about["metadata"]["uid"]
        name = names.evidence_name(key[1])
        async with self.writing(key):
            newest, body = self._newest.get(key), None
            if newest is None or newest[0] != uid:
                body = await self._client.get(CONFIGMAPS, key[0], name)
                newest = self._newest[key] = (uid, usage.parsed(body))
            after = await self._with(newest[1], self._informers.pods_of(key), report)
            if after == newest[1] or not any(each.figures.last for one in after.values() for each in one.pods):
                return
            body = body or await self._client.get(CONFIGMAPS, key[0], name)
            data = {"data": {names.USAGE_KEY: usage.dumped(after)}}
            if body is not None:
                await self._client.merge(CONFIGMAPS, body, data)
            elif self._informers.trainingjobs.get(key) is not None:
                job = TrainingJob.model_validate({**OF_KIND, "metadata": about["metadata"], "spec": about["spec"]})
                metadata = desired.metadata(job, uid, name)
                await self._client.create(CONFIGMAPS, key[0], {**OF_CONFIGMAP, "metadata": metadata, **data})
            self._newest[key] = (uid, after)

    async def _with(self, before: Used, pods: Sequence[Raw], report: Callable[[str], Awaitable[Raw]]) -> Used:
        """Return `before` with these pods added, and the nodes' newest figures of all its pods."""
        after = before
        for pod in sorted(pods, key=lambda each: str(each["metadata"].get("creationTimestamp"))):
            node, role = pod["spec"].get("nodeName", ""), (pod["metadata"].get("labels") or {}).get(names.ROLE)
            if node and role:
                after = usage.with_pod(after, f"{role}-{index_of(pod)}", pod["metadata"]["uid"], node)
        for node in usage.nodes(after):
            after = usage.with_figures(after, await report(node))
        return after

    async def _report(self, node: str) -> Raw:
        try:
            found = await self._client.get(CONFIGMAPS, self._namespace, usage_name(node))
        except (ApiError, Unavailable):
            return {}
        return (found or {}).get("data") or {}


def _is_looked_at(body: Raw, now: datetime) -> bool:
    status = body.get("status") or {}
    if status.get("phase") in ("Running", "Restarting"):
        return True
    ended = time_of(status.get("completionTime"))
    return ended is not None and (now - ended).total_seconds() < LATE_S
