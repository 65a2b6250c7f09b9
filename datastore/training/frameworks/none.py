"""No framework: tasks that need not know of each other. Each knows its index and rank by DATASTORE_INDEX and _RANK."""

from __future__ import annotations

from typing import Literal

from datastore.api.trainingjob import ROLES, RoleName
from datastore.training.frameworks.base import Framework
from datastore.training.topology import Topology


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Nothing besides what every task has."""
    return {}


def restart(topology: Topology) -> Literal["replica", "all"]:
    """Nobody waits for the others."""
    return "replica"


FRAMEWORK = Framework(name="none", environment=environment, roles=ROLES, restart=restart)
