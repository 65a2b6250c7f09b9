"""No framework: tasks that need not know of each other. Each has its DATASTORE_INDEX and DATASTORE_RANK."""

from __future__ import annotations

from typing import Literal

from datastore.api.trainingjob import ROLES, RoleName
from datastore.training.frameworks.base import Framework
from datastore.training.topology import Topology


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Return {}: there are no variables besides those of every task."""
    return {}


def restart(topology: Topology) -> Literal["replica", "all"]:
    """Return "replica", as no task waits for another one."""
    return "replica"


FRAMEWORK = Framework(name="none", environment=environment, roles=ROLES, restart=restart)
