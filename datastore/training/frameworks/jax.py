"""JAX: what jax.distributed.initialize wants. It reads JAX_COORDINATOR_ADDRESS by itself; the other two are passed:

jax.distributed.initialize(num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
                           process_id=int(os.environ["JAX_PROCESS_ID"]), cluster_detection_method="deactivate")

Without the last, JAX asks the API server of a cluster if the image has the package kubernetes; the pod has no token.
"""

from __future__ import annotations

from datastore.api.trainingjob import RoleName
from datastore.training.frameworks.base import RANK, Framework
from datastore.training.topology import Topology


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Where process 0 is, how many there are, and which one this is."""
    return {
        "JAX_COORDINATOR_ADDRESS": str(topology.address(topology.chief)),
        "JAX_NUM_PROCESSES": str(len(topology.ranked)),
        "JAX_PROCESS_ID": RANK,
    }


FRAMEWORK = Framework(name="jax", environment=environment)
