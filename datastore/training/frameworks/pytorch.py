"""PyTorch: the variables of init_process_group's env:// (pytorch.org/docs, "Distributed communication package") and, as
PET_*, the arguments of torchrun ("torchrun (Elastic Launch)": each can be given by the variable PET_NAME).

Without torchrun each task is one process, and RANK and WORLD_SIZE count tasks. torchrun starts a process for each GPU
of its task, or one process without GPUs, and sets both variables again.
"""

from __future__ import annotations

from datastore.api.trainingjob import RoleName
from datastore.training.frameworks.base import RANK, Framework
from datastore.training.topology import Topology


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Return the address of rank 0, the number of tasks, the task's rank, and the number of processes per task."""
    address = topology.address(topology.chief)
    size = str(len(topology.ranked))
    gpus = next((task.gpus for task in topology.of(role)), 0)
    return {
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
        "WORLD_SIZE": size,
        "RANK": RANK,
        "LOCAL_RANK": "0",
        "PET_NNODES": size,
        "PET_NPROC_PER_NODE": str(max(1, gpus)),
        "PET_NODE_RANK": RANK,
        "PET_MASTER_ADDR": address.host,
        "PET_MASTER_PORT": str(address.port),
    }


FRAMEWORK = Framework(name="pytorch", environment=environment)
