"""Makes the environment and the command line of a task, as Kubernetes does for a container. Pure.

$(NAME) stands for a variable that was set before, $$(NAME) for the text $(NAME), and $(NAME) stays as it is if NAME is
not set. These are the rules of Kubernetes (kubernetes.io/docs, "Define Dependent Environment Variables"); with them a
job's file means the same on a laptop and in a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from datastore.api.pod import EnvironmentVariable
from datastore.api.trainingjob import TrainingJob, role_of
from datastore.errors import InvalidManifest
from datastore.training.frameworks import FRAMEWORKS
from datastore.training.topology import RANKED, Task, Topology

_REFERENCE = re.compile(r"\$(\$|\(([^()$]*)\))")

Lookup = Callable[[EnvironmentVariable], str | None]
"""Returns the value of a variable that has valueFrom; None leaves the variable out. Errors: InvalidManifest."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with its references to variables replaced."""

    def value(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return variables.get(found[2], found[0])

    return _REFERENCE.sub(value, text)


def of_task(topology: Topology, job: TrainingJob, task: Task, lookup: Lookup, token: str = "") -> dict[str, str]:
    """Return the variables of a task: ours, the framework's, then the user's; each may refer to those before it."""
    framework = FRAMEWORKS[job.spec.framework]
    ranked = task.role in RANKED
    found = {
        "DATASTORE_JOB": job.name,
        "DATASTORE_ROLE": task.role,
        "DATASTORE_INDEX": str(task.index),
        "DATASTORE_RANK": str(topology.first_rank(task.role) + task.index if ranked else 0),
        **({"DATASTORE_TOKEN": token} if framework.needs_token else {}),
    }
    for name, value in framework.environment(topology, task.role).items():
        found[name] = expand(value, found)
    for each in role_of(job.spec, task.role).env:
        value_of = lookup(each) if each.value_from else expand(each.value or "", found)
        if value_of is not None:
            found[each.name] = value_of
    return found


def command_of(topology: Topology, job: TrainingJob, task: Task, variables: Mapping[str, str]) -> list[str]:
    """Return the command of a task with its arguments; [] stands for the image's own command."""
    role = role_of(job.spec, task.role)
    words = [*role.command, *(role.args or [])] if role.command else []
    framework = FRAMEWORKS[job.spec.framework]
    return [expand(word, variables) for word in framework.command(topology, task.role, words)]


def check_roles(job: TrainingJob, tasks: Sequence[Task]) -> None:
    """Check the roles. Errors: InvalidManifest when the framework lacks one, or needs a master and there is none."""
    framework = FRAMEWORKS[job.spec.framework]
    for task in tasks:
        if task.role not in framework.roles:
            raise InvalidManifest(
                f"TrainingJob {job.name}: spec.roles.{task.role}: {framework.name} has no {task.role}; "
                f"it has {', '.join(framework.roles)}"
            )
    if framework.needs_master and not any(task.role == "master" for task in tasks):
        raise InvalidManifest(
            f"TrainingJob {job.name}: spec.roles.master.replicas is 0, and {framework.name} needs the master: it runs "
            "the command, the workers wait for it"
        )
