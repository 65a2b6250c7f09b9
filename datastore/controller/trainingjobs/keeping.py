"""Keeps the evidence of a TrainingJob before its pods go: exit codes, times, the ends of the logs, in one ConfigMap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from datastore.api.resources import CONFIGMAPS, PODS
from datastore.api.trainingjob import TrainingJob
from datastore.controller.runtime.actor import Actor
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.trainingjobs import desired
from datastore.controller.trainingjobs.usage import UsageCollector
from datastore.training.cluster import names
from datastore.training.cluster.replicas import Replica
from datastore.training.cluster.usage import dumped, room
from datastore.training.evidence import LOG_BYTES, TOTAL_BYTES, Evidence, ReplicaEvidence, log_bytes, tail
from datastore.training.policy import State

Raw = Mapping[str, Any]

AT_ONCE = 8
"""How many logs are read at the same time."""
MARGIN_BYTES = 64 << 10
"""Room in the ConfigMap for its metadata and its list of pods."""
READ_BYTES = 4 << 20
LINES = (2000, 100, 5)
"""tailLines of each try: limitBytes cuts the end of a log, so of a log with long lines fewer lines are asked for."""


class EvidenceWriter:
    """Keeps evidence, as the module says. Errors: ApiError, Unavailable, LeaseLost; an unreadable log is no error."""

    def __init__(self, client: Client, actor: Actor, usage: UsageCollector) -> None:
        self._client = client
        self._actor = actor
        self._usage = usage
        self._reading = asyncio.Semaphore(AT_ONCE)

    async def keep(self, job: TrainingJob, uid: str, replicas: Sequence[Replica], restarts: int, now: datetime) -> None:
        """Add what is known of these replicas to the evidence kept before; a replica that runs is recorded as freed."""
        name = names.evidence_name(job.name)
        found = await self._client.get(CONFIGMAPS, job.namespace, name)
        before, logged = kept(found)
        size = log_bytes(len(names.cluster_topology(job).tasks))
        pods = [(each, [pod for pod in each.pods if pod["metadata"]["uid"] not in logged]) for each in replicas]
        logs = await asyncio.gather(*(self._logs(job.namespace, new) for _, new in pods))
        known = {each.name: each for each in before.replicas}
        for (replica, _), log in zip(pods, logs, strict=True):
            made = _ended(replica.evidence(restarts), now)
            old = known.get(made.name)
            if old is not None and not replica.pods:
                continue  # its pods are gone, and its evidence is kept already
            text = tail(f"{old.log if old else ''}{log}".encode(), size)
            known[made.name] = made.model_copy(update={"log": text})
        order = [task.name for task in names.cluster_topology(job).tasks]
        evidence = Evidence(replicas=[known[each] for each in order if each in known])
        uids = sorted(logged | {pod["metadata"]["uid"] for _, new in pods for pod in new})
        data = {names.EVIDENCE_KEY: bounded(evidence), names.LOGGED_KEY: json.dumps(uids[-1000:])}
        metadata = desired.metadata(job, uid, name)
        key, all_pods = (job.namespace, job.name), [pod for each in replicas for pod in each.pods]
        async with self._usage.writing(key):
            used = await self._usage.known(key, uid, found, all_pods)
            data[names.USAGE_KEY] = dumped(used)
            await self._actor.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    async def _logs(self, namespace: str, pods: Sequence[Raw]) -> str:
        """Return the ends of the logs of one replica's pods, the oldest first."""
        return "".join([await self._log(namespace, pod["metadata"]["name"]) for pod in pods])

    async def _log(self, namespace: str, pod: str) -> str:
        path = PODS.path(namespace, pod, "log")
        text = ""
        for lines in LINES:
            query = {"container": names.CONTAINER, "tailLines": str(lines), "limitBytes": str(READ_BYTES)}
            try:
                async with self._reading:
                    text = await self._client.text(path, query)
            except ApiError as error:
                # 400: the container never started. 404: the pod is gone.
                return "" if error.status in (400, 404) else f"[datastore] this log could not be read: {error}\n"
            except Unavailable as error:
                return f"[datastore] this log could not be read: {error}\n"
            if len(text) < READ_BYTES:
                break
        return text[-LOG_BYTES:] if text.endswith("\n") or not text else f"{text[-LOG_BYTES:]}\n"


def bounded(evidence: Evidence) -> str:
    """Return JSON that leaves room for the rest of the object; logs that grow as JSON, by escapes, are cut shorter."""
    size = LOG_BYTES
    while True:
        text = evidence.model_dump_json(by_alias=True, exclude_none=True)
        if len(text.encode()) <= TOTAL_BYTES - MARGIN_BYTES - room(len(evidence.replicas)) or size < 64:
            return text
        size //= 2
        cut = [each.model_copy(update={"log": tail(each.log.encode(), size)}) for each in evidence.replicas]
        evidence = Evidence(replicas=cut)


def kept(found: Raw | None) -> tuple[Evidence, set[str]]:
    """Return the evidence in a job's ConfigMap, and the uids of the pods whose logs are in it."""
    data = (found or {}).get("data") or {}
    try:
        evidence = Evidence.model_validate_json(data.get(names.EVIDENCE_KEY, "{}"))
        return evidence, set(json.loads(data.get(names.LOGGED_KEY, "[]")))
    except (ValidationError, ValueError):
        return Evidence(replicas=[]), set()  # somebody has edited the ConfigMap


def _ended(evidence: ReplicaEvidence, now: datetime) -> ReplicaEvidence:
    if evidence.state not in (State.RUNNING, State.PENDING):
        return evidence
    update: dict[str, Any] = {"state": State.FREED}
    return evidence.model_copy(update=update | ({"ended_at": now} if evidence.started_at else {}))
