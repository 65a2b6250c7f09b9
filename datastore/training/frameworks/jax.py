"""JAX: the variables for jax.distributed.initialize, which reads JAX_COORDINATOR_ADDRESS; programs pass the others:

jax.distributed.initialize(num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
                           process_id=int(os.environ["JAX_PROCESS_ID"]), cluster_detection_method="deactivate")

Without the last argument, JAX asks a cluster's API server if the image has the package kubernetes; pods have no token.
"""

from __future__ import annotations

from datastore.api.trainingjob import RoleName
from datastore.training.frameworks.base import RANK, Framework
from datastore.training.topology import Topology


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Return the address of process 0, the number of processes, and the task's rank among them."""
    return {
        "JAX_COORDINATOR_ADDRESS": str(topology.address(topology.chief)),
        "JAX_NUM_PROCESSES": str(len(topology.ranked)),
        "JAX_PROCESS_ID": RANK,
    }


FRAMEWORK = Framework(name="jax", environment=environment)
