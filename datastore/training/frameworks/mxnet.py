"""MXNet: the variables of ps-lite (mxnet.apache.org, "Distributed training in MXNet": manually launching jobs).

The master is ps-lite's scheduler, and the ps are its servers. They run the user's command too: `import mxnet` makes
them what DMLC_ROLE says, and ends them when the workers have ended. A process that was lost can't join again.
"""

from __future__ import annotations

from datastore.api.trainingjob import RoleName
from datastore.training.frameworks.base import Framework
from datastore.training.topology import Topology

_ROLES: dict[RoleName, str] = {"master": "scheduler", "ps": "server", "worker": "worker"}


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Return the scheduler's address, the numbers of servers and workers, and the role; {} without workers."""
    if not topology.of("worker"):
        return {}
    address = topology.address(topology.chief)
    return {
        "DMLC_PS_ROOT_URI": address.host,
        "DMLC_PS_ROOT_PORT": str(address.port),
        "DMLC_NUM_SERVER": str(len(topology.of("ps"))),
        "DMLC_NUM_WORKER": str(len(topology.of("worker"))),
        "DMLC_ROLE": _ROLES.get(role, role),
        **({"DMLC_NODE_HOST": address.host} if topology.one_host else {}),
    }


FRAMEWORK = Framework(name="mxnet", environment=environment, roles=("master", "ps", "worker"))
