"""What the replicas of a job in a cluster use, as its ConfigMap of evidence has it. Pure.

By replica, its pods in the order in which they were seen, with the node of each and the figures as the node plugin told
them last. Of all but the newest pods the figures are put together, so that the object stays small.
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
"""Of each replica, whose figures may still change."""
MAX_BYTES = 256 << 10
EACH_BYTES = 1 << 10
"""Of a replica, generously."""


@dataclass(frozen=True, slots=True)
class PodFigures:
    """One pod. figures: without samples when nothing was told of it yet."""

    uid: str
    node: str
    figures: Meter


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica. earlier: its older pods, put together."""

    pods: tuple[PodFigures, ...] = ()
    earlier: Meter | None = None

    def all(self) -> Meter:
        """From its first start on."""
        return together([*([self.earlier] if self.earlier else []), *(each.figures for each in self.pods)])

    def of(self, uid: str) -> Meter | None:
        """What is told of one pod."""
        return next((each.figures for each in self.pods if each.uid == uid), None)


Used = Mapping[str, ReplicaFigures]
"""By the names of the replicas, 'worker-0'."""


def room(replicas: int) -> int:
    """How many bytes of the object are left for this."""
    return min(MAX_BYTES, EACH_BYTES * replicas)


def parsed(found: Raw | None) -> Used:
    """What a ConfigMap of evidence has; {} when it is not there, or was edited."""
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
    """As parsed() reads it, in at most room() bytes: of a very large job the figures of some replicas are left out."""
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
    """used, and a pod of which nothing may be told yet; of its older ones only the sums stay."""
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
    """Where its pods are, or were."""
    return sorted({pod.node for each in used.values() for pod in each.pods})


def with_figures(used: Used, told: Raw) -> Used:
    """used, with what a node tells of its pods; of those that it does not know any more the last word stays."""

    def newest(pod: PodFigures) -> PodFigures:
        try:
            return replace(pod, figures=load(json.loads(told[pod.uid]))) if pod.uid in told else pod
        except ValueError:
            return pod

    return {
        name: replace(each, pods=tuple(newest(pod) for pod in each.pods)) if told else each
        for name, each in used.items()
    }
