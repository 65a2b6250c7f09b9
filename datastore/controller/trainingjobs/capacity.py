"""Computes whether all replicas of a gang fit at the same time, and whether a replica ever fits. Pure.

A gang is placed by first fit, the largest replica first, into what each node has left. Only requests count, as for the
scheduler, and only nodes that nodeSelector, required node affinity and tolerations allow. Pod affinity and volume
topology are ignored; a gang that can't start because of these gives its resources back at its start deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from datastore.api.objects import is_true
from datastore.units import exact_quantity

Raw = Mapping[str, Any]
Amounts = dict[str, Fraction]


def lacking(jobs: Sequence[Raw], nodes: Sequence[Raw], pods: Sequence[Raw]) -> str:
    """Say what does not fit, for people; '' when all replicas of these Jobs do. pods: all pods that have a node."""
    if told := too_large(jobs, nodes):
        return told
    free = {node["metadata"]["name"]: _allocatable(node) for node in nodes if _takes_pods(node)}
    for pod in pods:
        room = free.get(pod["spec"].get("nodeName", ""))
        if room is not None and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            _take(room, _requests(pod["spec"]))
    by_name = {node["metadata"]["name"]: node for node in nodes}
    wanted = [
        (each["metadata"]["name"], each["spec"]["template"]["spec"])
        for each in jobs
        for _ in range(each["spec"]["completions"])
    ]
    wanted.sort(key=lambda each: sorted(_requests(each[1]).values(), reverse=True), reverse=True)
    for name, spec in wanted:
        needs = _requests(spec)
        place = next((room for node, room in free.items() if _fits(needs, room) and _suits(spec, by_name[node])), None)
        if place is None:
            told = ", ".join(_shown(key, value) for key, value in needs.items() if key != "pods")
            return f"no node has room for a replica of {name} beside the others ({told or 'it asks for nothing'})"
        _take(place, needs)
    return ""


def too_large(jobs: Sequence[Raw], nodes: Sequence[Raw]) -> str:
    """Say which request of a replica of these Jobs is too large even for an empty node, for people; '' for none."""
    for job in jobs:
        for resource, amount in _requests(job["spec"]["template"]["spec"]).items():
            has = {node["metadata"]["name"]: _allocatable(node).get(resource, Fraction(0)) for node in nodes}
            largest = max(has, key=lambda name: has[name], default="")
            if not largest or amount <= has[largest]:
                continue
            asks = f"a replica of {job['metadata']['name']} asks for {_shown(resource, amount)}"
            of_devices = "/" in resource
            if of_devices and not has[largest]:
                return (
                    f"{asks}, but no node has any: name what the nodes have in spec.gpuResource, or have the device "
                    "plugin installed that tells of them; it waits for such a node"
                )
            fields = "spec.gpusPerTask, or gpus of its role," if of_devices else "its resources"
            return (
                f"{asks}, but the largest node, {largest}, has {_shown(resource, has[largest])}: lower {fields} to "
                "that, or have a larger node added; it waits for such a node"
            )
    return ""


def _takes_pods(node: Raw) -> bool:
    return is_true(node, "Ready") and not node["spec"].get("unschedulable")


def _suits(spec: Raw, node: Raw) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    required = _of(_of(spec, "affinity"), "nodeAffinity").get("requiredDuringSchedulingIgnoredDuringExecution")
    if required and not any(_matches(term, node) for term in required.get("nodeSelectorTerms") or []):
        return False
    taints = [each for each in node["spec"].get("taints") or [] if each["effect"] in ("NoSchedule", "NoExecute")]
    return all(any(_tolerates(each, taint) for each in spec.get("tolerations") or []) for taint in taints)


def _of(body: Raw, name: str) -> Raw:
    return body.get(name) or {}


def _matches(term: Raw, node: Raw) -> bool:
    """Return whether a node selector term (core/v1) selects a node: it has expressions, and all of them hold."""
    labels, fields = node["metadata"].get("labels") or {}, {"metadata.name": node["metadata"]["name"]}
    on_labels, on_fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    return bool(on_labels or on_fields) and (
        all(_holds(each, labels) for each in on_labels) and all(_holds(each, fields) for each in on_fields)
    )


def _holds(expression: Raw, labels: Raw) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                there, limit = int(str(value)), int(values[0])
            except (TypeError, ValueError, IndexError):
                return False
            return there > limit if operator == "Gt" else there < limit
    return False


def _tolerates(toleration: Raw, taint: Raw) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _allocatable(node: Raw) -> Amounts:
    return {name: exact_quantity(amount) for name, amount in node["status"].get("allocatable", {}).items()}


def _requests(spec: Raw) -> Amounts:
    total: Amounts = {"pods": Fraction(1)}
    for container in spec.get("containers") or []:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, Fraction(0)) + exact_quantity(amount)
    return total


def _fits(needs: Amounts, room: Amounts) -> bool:
    return all(room.get(name, Fraction(0)) >= amount for name, amount in needs.items() if amount)


def _take(room: Amounts, needs: Amounts) -> None:
    for name, amount in needs.items():
        room[name] = room.get(name, Fraction(0)) - amount


def _shown(resource: str, amount: Fraction) -> str:
    if resource in ("memory", "ephemeral-storage"):
        return f"{float(amount / (1 << 30)):.3g} GiB of {resource}"
    return f"{int(amount) if amount.denominator == 1 else f'{float(amount):g}'} {resource}"
