"""Finds the result of a training that spec.save saves, the command that made it, and what shows its figures. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath

from datastore.api.trainingjob import RoleName, TrainingJob, TrainingJobSpec, role_of
from datastore.errors import InvalidManifest


def place_of_result(job: TrainingJob) -> tuple[str, str]:
    """Return the Datastore of the directory that spec.save.from names, and the directory's path in it ('': its root).
    If a Datastore is mounted below another one, the inner one counts. Errors: InvalidManifest when the directory is in
    no Datastore of the job, or in a read-only one."""
    assert job.spec.save is not None
    wanted = PurePosixPath("/", job.spec.save.source)
    where = f"TrainingJob {job.name}: spec.save.from"
    above = [each for each in job.spec.datastores if wanted.is_relative_to(PurePosixPath("/", each.path))]
    if not above:
        paths = ", ".join(each.path for each in job.spec.datastores) or "none"
        raise InvalidManifest(f"{where}: {wanted} is in none of the job's Datastores ({paths}), so nothing would stay")
    inner = max(above, key=lambda each: len(PurePosixPath("/", each.path).parts))
    if inner.read_only:
        raise InvalidManifest(f"{where}: {wanted} is in the Datastore {inner.name}, which the job mounts read-only")
    below = PurePosixPath(inner.sub_path, wanted.relative_to(PurePosixPath("/", inner.path)))
    return inner.name, "" if str(below) == "." else str(below)


def chief_of(spec: TrainingJobSpec) -> RoleName:
    """Return the role whose first replica is the chief, which leads and saves: master, or worker without a master."""
    return "worker" if role_of(spec, "master").replicas == 0 else "master"


def command_of_result(job: TrainingJob) -> list[str]:
    """Return the command and the arguments with which the chief made the result."""
    chief = role_of(job.spec, chief_of(job.spec))
    return [*(chief.command or []), *(chief.args or [])]


def tensorboard_arguments(directory: str, port: int) -> list[str]:
    """Return the arguments with which TensorBoard shows a directory, on the loopback interface only."""
    return [
        *("--logdir", directory, "--host", "127.0.0.1", "--port", str(port)),
        *("--load_fast", "false", "--reload_interval", "5"),
    ]
