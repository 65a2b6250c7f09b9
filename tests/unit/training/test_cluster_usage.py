"""datastore.training.cluster.usage: what a job's ConfigMap has of what its replicas use."""

from __future__ import annotations

import json

import pytest

from datastore.metering import Meter, Sample
from datastore.training.cluster import names
from datastore.training.cluster.usage import MAX_BYTES, Used, dumped, nodes, parsed, with_figures, with_pod
from tests.promises import promise


def told(cpu_s: float, memory: int = 100) -> str:
    meter = Meter()
    meter.add(Sample(at_s=0, cpu_s=0.0, memory_bytes=memory))
    meter.add(Sample(at_s=10, cpu_s=cpu_s, memory_bytes=memory))
    return json.dumps(meter.dump())


def object_of(used: Used) -> dict[str, dict[str, str]]:
    return {"data": {names.USAGE_KEY: dumped(used)}}


@promise("S-359")
def test_of_a_replica_that_started_often_only_the_sums_stay() -> None:
    """What was told last of a pod stays when its node does not know the pod any more."""
    used: Used = {}
    for number in range(6):
        used = with_pod(used, "worker-0", f"u{number}", f"n{number % 2}")
        used = with_figures(used, {f"u{number}": told(10.0, 100 + number), "another-jobs": told(1.0)})
        used = with_figures(used, {})
    used = parsed(object_of(with_pod(used, "worker-0", "u5", "n1")))
    found = used["worker-0"].all().usage()
    assert found is not None
    assert (found.cpu_seconds, found.cpu.mean, found.memory.peak) == (60.0, 1.0, 105)
    assert [each.uid for each in used["worker-0"].pods] == ["u4", "u5"]
    assert nodes(used) == ["n0", "n1"]


@promise("S-359")
def test_it_stays_small_however_large_the_job() -> None:
    used: Used = {}
    for number in range(3000):
        used = with_pod(used, f"worker-{number}", f"{number:036}", "a-node-with-a-long-name")
    used = with_figures(used, {f"{number:036}": told(1.234) for number in range(3000)})
    text = dumped(used)
    assert MAX_BYTES / 2 < len(text) <= MAX_BYTES
    assert "worker-0" in parsed(object_of(used))


@promise("S-359")
@pytest.mark.parametrize("text", ["", "[]", "{", '{"worker-0": {}}', '{"worker-0": {"pods": [["u", "n", [1]]]}}'])
def test_an_edited_report_counts_as_empty(text: str) -> None:
    assert parsed({"data": {names.USAGE_KEY: text}}) == {}
