"""The resource usage of a job's replicas in a cluster, as the job's ConfigMap of evidence has it. Pure.

Each replica has its newest pods in the order in which they were seen, each with its node and with the figures that the
node plugin reported last. The figures of older pods are combined, so that the object stays small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datastore.metering import Meter, load, together
from datastore.training.cluster import names

Raw = Mapping[str, Any]

PODS = 2
"""How many of a replica's pods keep their own figures, as these may still change."""
MAX_BYTES = 256 << 10
EACH_BYTES = 1 << 10
"""A generous estimate of the bytes for one replica."""


@dataclass(frozen=True, slots=True)
class PodFigures:
    """The figures of one pod; the Meter has no samples while nothing was reported."""

    uid: str
    node: str
    figures: Meter


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """The figures of one replica's newest pods. earlier: those of its older pods, combined."""

    pods: tuple[PodFigures, ...] = ()
    earlier: Meter | None = None

    def all(self) -> Meter:
        """Return the figures of all pods combined, from the replica's first start on."""
        return together([*([self.earlier] if self.earlier else []), *(each.figures for each in self.pods)])

    def of(self, uid: str) -> Meter | None:
        """Return the figures of one pod; None when it is not among the newest."""
        return next((each.figures for each in self.pods if each.uid == uid), None)


Used = Mapping[str, ReplicaFigures]
"""The figures of replicas, by their names, such as 'worker-0'."""


def room(replicas: int) -> int:
    """Return how many bytes of the ConfigMap are reserved for the figures."""
    return min(MAX_BYTES, EACH_BYTES * replicas)


def parsed(found: Raw | None) -> Used:
    """Return the figures in a ConfigMap of evidence; {} when there are none, or they were edited and can't be read."""
    try:
        document = json.loads(((found or {}).get("data") or {}).get(names.USAGE_KEY, "{}"))
        return {
            name: ReplicaFigures(
                pods=tuple(PodFigures(uid, node, load(figures)) for uid, node, figures in each["pods"]),
                earlier=load(each["earlier"]) if each.get("earlier") else None,
            )
            for name, each in document.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def dumped(used: Used) -> str:
    """Return JSON for parsed(), at most MAX_BYTES: for a very large job, the figures of some replicas are left out."""
    whole = {
        name: {
            "pods": [[pod.uid, pod.node, pod.figures.dump()] for pod in each.pods],
            **({"earlier": each.earlier.dump()} if each.earlier else {}),
        }
        for name, each in used.items()
    }
    while True:
        text = json.dumps(whole, separators=(",", ":"))
        if len(text) <= MAX_BYTES:
            return text
        whole = dict(list(whole.items())[: int(len(whole) * MAX_BYTES / len(text) * 0.95)])


def with_pod(used: Used, replica: str, uid: str, node: str) -> Used:
    """Return `used` with a pod added, without figures; combine the figures of the replica's older pods."""
    before = used.get(replica, ReplicaFigures())
    if any(each.uid == uid for each in before.pods):
        return used
    pods = (*before.pods, PodFigures(uid, node, Meter()))
    old, new = pods[:-PODS], pods[-PODS:]
    earlier = before.earlier
    if old:
        earlier = together([*([earlier] if earlier else []), *(each.figures for each in old)])
    return {**used, replica: ReplicaFigures(pods=new, earlier=earlier)}


def nodes(used: Used) -> list[str]:
    """Return the names of the nodes that the pods run, or ran, on."""
    return sorted({pod.node for each in used.values() for pod in each.pods})


def with_figures(used: Used, told: Raw) -> Used:
    """Return `used` with what a node reported on its pods, by uid; pods that it does not name keep their figures."""

    def newest(pod: PodFigures) -> PodFigures:
        try:
            return replace(pod, figures=load(json.loads(told[pod.uid]))) if pod.uid in told else pod
        except ValueError:
            return pod

    return {
        name: replace(each, pods=tuple(newest(pod) for pod in each.pods)) if told else each
        for name, each in used.items()
    }
