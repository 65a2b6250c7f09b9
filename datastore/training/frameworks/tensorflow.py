"""TensorFlow: TF_CONFIG (tensorflow.org, "Distributed training with TensorFlow": cluster and task).

The master is the "chief". A single task gets no TF_CONFIG, as it needs none. The evaluator is not part of the cluster,
as TensorFlow defines it. With parameter servers, one replica can be restarted alone; the workers of
MultiWorkerMirroredStrategy wait for each other, so all are restarted.
"""

from __future__ import annotations

import json
from typing import Literal

from datastore.api.trainingjob import RoleName
from datastore.training.frameworks.base import INDEX, Framework
from datastore.training.topology import Topology

_TYPES: tuple[tuple[RoleName, str], ...] = (("master", "chief"), ("worker", "worker"), ("ps", "ps"))


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Return TF_CONFIG for a role, with a reference to DATASTORE_INDEX as the task's index."""
    if len(topology.tasks) == 1:
        return {}
    cluster = {type_: hosts for each, type_ in _TYPES if (hosts := topology.hosts(each))}
    task = {"type": dict(_TYPES).get(role, role), "index": INDEX}
    text = json.dumps({"cluster": cluster, "task": task}, separators=(",", ":"))
    return {"TF_CONFIG": text.replace(f'"{INDEX}"', INDEX)}


def restart(topology: Topology) -> Literal["replica", "all"]:
    """Return "replica" for a job with parameter servers, else "all"."""
    return "replica" if topology.of("ps") else "all"


FRAMEWORK = Framework(
    name="tensorflow",
    environment=environment,
    roles=("master", "ps", "worker", "evaluator"),
    success="chief",
    restart=restart,
)
