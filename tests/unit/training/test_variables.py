"""datastore.training.variables: the environment and the words of a command, as Kubernetes makes them (S-340)."""

from __future__ import annotations

import pytest

from datastore.training.variables import command_of, expand, of_task
from tests.promises import promise
from tests.unit.training.jobs import in_a_cluster, job


@promise("S-340")
@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A}", "$A ${A}"),
        ("$(A", "$(A"),
    ],
)
def test_references_are_those_of_kubernetes(text: str, made: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == made


@promise("S-340")
def test_a_variable_sees_those_before_it_and_a_role_wins() -> None:
    made = job(
        "args: ['--out', '$(OUT)', '--index=$(DATASTORE_INDEX)'], "
        "env: [{name: ROOT, value: /data}, {name: OUT, value: $(ROOT)/$(LATER)}, {name: LATER, value: x}], "
        "roles: {worker: {replicas: 2, env: [{name: OUT, value: /other}]}}",
        "none",
    )
    topology = in_a_cluster(made)
    master, _, worker = topology.tasks
    found = of_task(topology, made, master, lambda each: None)
    assert found["OUT"] == "/data/$(LATER)"
    assert command_of(topology, made, master, found)[2:] == ["--out", "/data/$(LATER)", "--index=0"]
    found = of_task(topology, made, worker, lambda each: None)
    assert command_of(topology, made, worker, found)[2:] == ["--out", "/other", "--index=1"]


@promise("S-340")
def test_a_value_from_a_secret_is_looked_up_and_an_absent_one_left_out() -> None:
    made = job(
        "env: [{name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}, "
        "{name: GONE, valueFrom: {secretKeyRef: {name: s, key: gone, optional: true}}}, {name: A, value: $(KEY)}]"
    )
    topology = in_a_cluster(made)
    found = of_task(topology, made, topology.chief, lambda each: "hidden" if each.name == "KEY" else None)
    assert (found["KEY"], found["A"], "GONE" in found) == ("hidden", "hidden", False)
