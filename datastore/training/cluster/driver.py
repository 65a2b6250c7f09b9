"""The driver for a Kubernetes cluster, which acts with the rights of the user who runs the command.

It only creates, reads, patches and deletes objects; the controller (datastore/controller/trainingjobs) does the work.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from datastore.api.datastore import KIND as DATASTORE_KIND
from datastore.api.manifest import Manifest, objects_of
from datastore.api.resources import CONFIGMAPS, DATASTORES, PODS, SECRETS, TRAININGJOBS, Resource
from datastore.api.trainingjob import KIND, RoleName, TrainingJob, TrainingJobStatus
from datastore.errors import DatastoreError, InvalidRequest, NotFound, Unreachable
from datastore.kubeclient import EVERYWHERE, Conflict, KubeClient, Outage
from datastore.training.cluster import names, usage
from datastore.training.cluster.replicas import replicas_of
from datastore.training.driver import JobExists, LogLine, NoSuchJob, Observed, check, check_goes_on, chosen, newest
from datastore.training.evidence import Evidence
from datastore.training.loglines import LineSplitter
from datastore.training.policy import State
from datastore.training.topology import Task

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]

WHERE = "cluster"
POLL_S = 1.0
FREE_TIMEOUT_S = 120.0
STALE_S = 60.0
"""The age from which figures no longer count as present."""
_TRAIL = 5
"""How many of the last printed lines are compared to find their place in the log that the evidence has."""
_TAIL_MORE = 1000
"""How many lines more than wanted are read of the end of a log: the kubelet counts each 16 KiB of a line as a line, and
of lines with the same time either all or none must be read."""
_ENDED = ("Succeeded", "Failed", "Suspended")


class KubernetesDriver:
    """See Driver. say: called with a line when the API server is away while a log is followed."""

    def __init__(self, client: KubeClient, say: Callable[[str], None] = log.info) -> None:
        self._client = client
        self._say = say

    @property
    def client(self) -> KubeClient:
        """The client of the cluster, with the user's rights."""
        return self._client

    def create(self, job: TrainingJob, manifest: Manifest) -> Observed:
        """See Driver. Datastores and Secrets of the file are created if they don't exist, and else left as they are."""
        check(job)
        # As with kubectl, a job without a namespace gets that of kubectl's context.
        given = [each for each in objects_of(manifest) if (each.get("metadata") or {}).get("name") == job.name]
        said = any((each.get("metadata") or {}).get("namespace") for each in given if each.get("kind") == KIND)
        space = job.namespace if said else self._client.namespace
        wanted: list[tuple[Resource, Raw]] = []
        own: Raw | None = None
        for document in objects_of(manifest):
            kind, metadata = document.get("kind"), document.get("metadata") or {}
            here = (metadata.get("namespace") or (job.namespace if said else space)) == space
            if kind == KIND and here and metadata.get("name") == job.name:
                own = document
            elif here and kind in (DATASTORE_KIND, "Secret"):
                wanted.append((DATASTORES if kind == DATASTORE_KIND else SECRETS, document))
        assert own is not None, "the job is from this manifest"
        made: list[tuple[Resource, str]] = []
        try:
            for resource, document in wanted:
                try:
                    self._client.create(resource, document, namespace=space)
                    made.append((resource, document["metadata"]["name"]))
                except Conflict:
                    pass  # it exists already
            self._client.create(TRAININGJOBS, own, namespace=space)
        except BaseException as error:
            for resource, name in reversed(made):
                self._client.delete(resource, name, namespace=space)
            if isinstance(error, Conflict):
                raise JobExists(job.name) from None
            raise
        return self.observe(job.name, space)

    def observe(self, name: str, namespace: str) -> Observed:
        """See Driver."""
        return self._observed(self._found(name, namespace), pods=None)

    def observe_all(self, namespace: str | None = None) -> Sequence[Observed]:
        """See Driver. The evidence of the jobs is empty, as it would take more requests for each."""
        bodies = self._client.list(TRAININGJOBS, namespace=EVERYWHERE if namespace is None else namespace)
        found = []
        for body in bodies:
            try:
                found.append(self._observed(body, pods=[]))
            except ValidationError:
                continue  # it is from another version of this project
        return found

    def suspend(self, name: str, namespace: str, *, suspended: bool) -> None:
        """See Driver."""
        check_goes_on(name, self.observe(name, namespace).status.phase)
        self._client.patch(TRAININGJOBS, name, {"spec": {"suspend": suspended}}, namespace=namespace)

    def free(self, name: str, namespace: str) -> float:
        """See Driver."""
        began = time.monotonic()
        if not self.observe(name, namespace).ended:
            change = {"metadata": {"annotations": {names.FREE: datetime.now(UTC).isoformat(timespec="seconds")}}}
            self._client.patch(TRAININGJOBS, name, change, namespace=namespace)
        while not self.observe(name, namespace).ended:
            if time.monotonic() - began > FREE_TIMEOUT_S:
                raise DatastoreError(
                    f"TrainingJob {name} is not freed after {FREE_TIMEOUT_S:.0f} s: does its controller run "
                    "(deployment datastore-training-controller)?"
                )
            time.sleep(POLL_S / 4)
        return time.monotonic() - began

    def logs(
        self,
        name: str,
        namespace: str,
        role: RoleName | None = None,
        index: int | None = None,
        *,
        follow: bool = False,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """See Driver. Of pods that were freed, only the end of their logs is kept."""
        job = _parsed(self._found(name, namespace))
        readers = [_Reader(self._client, job, task) for task in chosen(job, role, index)]
        outage = Outage()
        while True:
            ended = False
            try:
                ended = self.observe(name, namespace).status.phase in _ENDED
                new = self._new_lines(name, namespace, readers, tail, last=ended or not follow)
                yield from newest(new, tail)
                tail = None
                outage.over()
            except Unreachable as error:
                if not follow:
                    raise
                if outage.bear(error):
                    self._say(f"{error}; the job continues, and its log is shown again when it answers")
            if ended or not follow:
                return
            time.sleep(POLL_S)

    def _new_lines(
        self, name: str, namespace: str, readers: Sequence[_Reader], tail: int | None, *, last: bool
    ) -> Iterator[LogLine]:
        pods = self._pods(name, namespace)
        kept, logged = self._evidence(name, namespace)
        logs = {each.name: each.log for each in kept.replicas}
        for reader in readers:
            own = [pod for pod in pods if _is_of(pod, reader.task) and pod["metadata"]["uid"] not in logged]
            yield from reader.kept(logs.get(reader.task.name, ""))
            for pod in sorted(own, key=lambda each: str(each["metadata"].get("creationTimestamp"))):
                ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
                yield from reader.new(pod, tail, last=last or ended)

    def metrics(self, name: str, namespace: str) -> Sequence[dict[str, Any]]:
        """See Driver. The figures are from the node plugins, which report every 10 s; `why` says why there are none."""
        job = _parsed(self._found(name, namespace))
        evidence = self._client.get(CONFIGMAPS, names.evidence_name(name), namespace=namespace)
        used = usage.parsed(evidence)
        rows = []
        for replica in replicas_of(names.cluster_topology(job), {}, self._pods(name, namespace)):
            if replica.state.state is not State.RUNNING:
                continue
            pod = replica.pods[-1]
            told = used.get(replica.task.name, usage.ReplicaFigures()).of(pod["metadata"]["uid"])
            row = {"role": replica.task.role, "index": replica.task.index}
            fresh = told is not None and told.last is not None and time.time() - told.last.at_s < STALE_S
            rows.append(row | (told.now if told is not None and fresh else {"why": _untold(pod["spec"]["nodeName"])}))
        return rows

    def delete(self, name: str, namespace: str) -> Sequence[str]:
        """See Driver. The cluster removes the objects that the job owns, and the nodes upload what they have."""
        if not self._client.delete(TRAININGJOBS, name, namespace=namespace):
            raise self._no_such(name, namespace)
        return []

    def notes(self, name: str, namespace: str) -> list[str]:
        """Return [], as a cluster does all that a job can ask for."""
        return []

    # The state of the objects.

    def _found(self, name: str, namespace: str) -> dict[str, Any]:
        found = self._client.get(TRAININGJOBS, name, namespace=namespace)
        if found is None:
            raise self._no_such(name, namespace)
        return found

    def _no_such(self, name: str, namespace: str) -> NoSuchJob:
        return NoSuchJob(f"there is no TrainingJob {name} in namespace {namespace}, nor on this machine")

    def _observed(self, body: Raw, *, pods: Sequence[Raw] | None) -> Observed:
        """Return the state of a job from its object. pods: None: read its pods and its evidence too; []: do not."""
        job = _parsed(body)
        status = _status_of(body)
        evidence = Evidence(replicas=[])
        if pods is None:
            pods = self._pods(job.name, job.namespace)
            found = self._client.get(CONFIGMAPS, names.evidence_name(job.name), namespace=job.namespace)
            evidence, _ = _kept(found, job.name)
            topology = names.cluster_topology(job)
            live = {each.task.name: each.evidence(0) for each in replicas_of(topology, {}, pods) if each.pods}
            kept = {each.name: each for each in evidence.replicas}
            # What a pod shows is newer than the evidence, except after the end, when the evidence is complete.
            both = {**live, **kept} if status.phase in _ENDED else {**kept, **live}
            used = {each: figures.all().usage() for each, figures in usage.parsed(found).items()}
            there = [both[task.name] for task in topology.tasks if task.name in both]
            evidence = Evidence(replicas=[each.model_copy(update={"usage": used.get(each.name)}) for each in there])
        return Observed(job=job, status=status, evidence=evidence, where=WHERE)

    def _pods(self, name: str, namespace: str) -> list[dict[str, Any]]:
        return self._client.list(PODS, namespace=namespace, selector=f"{names.JOB}={name}")

    def _evidence(self, name: str, namespace: str) -> tuple[Evidence, set[str]]:
        """Return the evidence of a job, and the uids of the pods whose logs are in it."""
        return _kept(self._client.get(CONFIGMAPS, names.evidence_name(name), namespace=namespace), name)


def _kept(found: Raw | None, name: str) -> tuple[Evidence, set[str]]:
    data = (found or {}).get("data") or {}
    try:
        evidence = Evidence.model_validate_json(data.get(names.EVIDENCE_KEY, '{"replicas": []}'))
        return evidence, set(json.loads(data.get(names.LOGGED_KEY, "[]")))
    except (ValidationError, ValueError):
        raise DatastoreError(
            f"ConfigMap {names.evidence_name(name)} was edited, and can't be read as what was kept of {name}"
        ) from None


def _untold(node: str) -> str:
    return (
        f"nothing was told of it lately: the node plugin of {node} does so within 20 s of its start, if it runs there "
        "(kubectl get pods -A -l app.kubernetes.io/component=node -o wide)"
    )


class _Reader:
    """Yields each line of a replica's log once, from the replica's pods while they exist, then from the evidence."""

    def __init__(self, client: KubeClient, job: TrainingJob, task: Task) -> None:
        self.task = task
        self._client = client
        self._namespace = job.namespace
        self._pods: dict[str, _PodLog] = {}
        self._trail: deque[str] = deque(maxlen=_TRAIL)
        self._kept = ""

    def new(self, pod: Raw, tail: int | None, *, last: bool) -> Iterator[LogLine]:
        """Yield the lines of a pod since the last call. tail: at first only so many, or some more. last: also a last
        line without an end."""
        read = self._pods.setdefault(pod["metadata"]["uid"], _PodLog())
        query = [("container", names.CONTAINER), ("timestamps", "true"), *read.since]
        if tail is not None and not read.since:
            query.append(("tailLines", str(tail + _TAIL_MORE)))
        try:
            text = self._client.text(PODS.path(self._namespace, pod["metadata"]["name"], "log"), query)
        except (InvalidRequest, NotFound):
            text = ""  # it has not started, or is gone
        for line in read.new(text, last=last):
            yield self._line(line)

    def kept(self, log: str) -> Iterator[LogLine]:
        """Yield the lines of the log in the evidence that were not printed before."""
        if log == self._kept:
            return
        self._kept = log
        whole = LineSplitter()
        lines = [*whole.feed(log.encode()), *whole.end()]
        yield from [self._line(words) for words in lines[_printed(lines, list(self._trail)) :]]

    def _line(self, words: str) -> LogLine:
        self._trail.append(words)
        return LogLine(role=self.task.role, index=self.task.index, text=words)


class _PodLog:
    """What was read of the log of one pod. The kubelet writes a time before each line that ends with a newline, and
    gives the beginning of one that has no end yet."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._last = b""
        """The newest time that was read."""
        self._read_bytes = 0
        """How much was read of what has that time: several lines may have the same, and the last one may grow."""

    @property
    def since(self) -> list[tuple[str, str]]:
        """The query for what may be new: as it has whole seconds only, some of it comes again."""
        return [("sinceTime", f"{self._last[:19].decode()}Z")] if self._last else []

    def new(self, text: str, *, last: bool) -> Iterator[str]:
        """Yield the lines that are new in an answer. last: also a last line without an end."""
        again = self._read_bytes
        for entry in io.BytesIO(text.encode()):  # by newlines only, where splitlines() knows a dozen other ends
            at, _, words = entry.partition(b" ")
            if at < self._last:
                continue
            if at > self._last:
                self._last, self._read_bytes, again = at, 0, 0
            new = words[again:]
            again -= len(words) - len(new)
            self._read_bytes += len(new)
            yield from self._lines.feed(new)
        if last:
            yield from self._lines.end()


def _printed(lines: Sequence[str], trail: Sequence[str]) -> int:
    """Return how many of the lines were printed, by finding the last printed lines (trail) in them; 0: not found."""
    for length in range(len(trail), 0, -1):
        for end in range(len(lines), length - 1, -1):
            if list(lines[end - length : end]) == list(trail[-length:]):
                return end
    return 0


def _parsed(body: Raw) -> TrainingJob:
    return TrainingJob.model_validate({name: body[name] for name in ("apiVersion", "kind", "metadata", "spec")})


def _status_of(body: Raw) -> TrainingJobStatus:
    return TrainingJobStatus.model_validate({"phase": "Pending", **(body.get("status") or {})})


def _is_of(pod: Raw, task: Task) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return (labels.get(names.ROLE), labels.get(names.INDEX)) == (task.role, str(task.index))
