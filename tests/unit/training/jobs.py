"""TrainingJobs for tests, from a few lines of YAML."""

from __future__ import annotations

import yaml

from datastore.api.trainingjob import TrainingJob
from datastore.training.topology import Address, Task, Topology, topology_of


def job(spec: str = "", framework: str = "tensorflow", name: str = "digits") -> TrainingJob:
    """Return a job with this framework. spec: the inside of a YAML mapping."""
    fields = {"framework": framework, "command": ["python", "train.py"], **(yaml.safe_load(f"{{{spec}}}") or {})}
    head = {"apiVersion": "datastore.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
    return TrainingJob.model_validate({**head, "spec": fields})


def in_a_cluster(made: TrainingJob) -> Topology:
    """Return the addresses of pods of Indexed Jobs: digits-worker-0.digits:2222."""
    return topology_of(
        made.name, made.spec, lambda task: Address(host=f"{made.name}-{task.name}.{made.name}", port=2222)
    )


def on_one_host(made: TrainingJob) -> Topology:
    """Return loopback ports: master-0 has 20000, and so on."""
    ports: dict[Task, int] = {}
    return topology_of(
        made.name,
        made.spec,
        lambda task: Address(host="127.0.0.1", port=ports.setdefault(task, 20000 + len(ports))),
        one_host=True,
    )
