"""Sets up what a job needs before its replicas start: its mounts, their isolation, addresses, files and commands.

Everything that can be wrong with a job on this machine is found here, before anything of it runs.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from datastore.api.manifest import Manifest
from datastore.api.pod import EnvironmentVariable
from datastore.api.trainingjob import TrainingJob, role_of
from datastore.errors import DatastoreError, InvalidManifest
from datastore.training.frameworks import FRAMEWORKS
from datastore.training.frameworks.base import FILES
from datastore.training.local import gpus, sandbox
from datastore.training.local.cgroups import Limits
from datastore.training.local.gpus import Gpu
from datastore.training.local.isolation import Container, Isolation, Namespaces, Run, find_engine
from datastore.training.local.mounts import Mounts
from datastore.training.local.records import JobDirectory, Submitter
from datastore.training.local.sandbox import Shown
from datastore.training.topology import Address, Task, Topology, topology_of
from datastore.training.variables import command_of, expand, of_task
from datastore.units import exact_quantity, parse_quantity

_FIRST_PORT, _LAST_PORT = 20_000, 32_000
"""Ports of tasks: below those of outgoing connections (net.ipv4.ip_local_port_range begins at 32768)."""


class Setup:
    """What one run of a job needs. run_id: DATASTORE_RUN of its processes, which no other run has. note: called with
    what is different on this machine."""

    topology: Topology

    def __init__(
        self,
        directory: JobDirectory,
        submitter: Submitter,
        job: TrainingJob,
        manifest: Manifest,
        note: Callable[[str], None],
    ) -> None:
        self.run_id = secrets.token_hex(8)
        self._token = secrets.token_hex(32)
        self._directory = directory
        self._submitter = submitter
        self._job = job
        self._manifest = manifest
        self._note = note
        self._new_topology()

    def renew_addresses(self) -> None:
        """Give all tasks new ports, since the old ones may not be free yet; all of them have to start again."""
        self._new_topology()
        self._framework_files()

    def _new_topology(self) -> None:
        taken: set[int] = set()

        def address(task: Task) -> Address:
            taken.add(port := free_port(taken))
            return Address(host="127.0.0.1", port=port)

        self.topology = topology_of(self._job.name, self._job.spec, address, one_host=True)

    def _framework_files(self) -> dict[str, Shown]:
        made = FRAMEWORKS[self._job.spec.framework].files(self.topology)
        for name, text in made.items():
            path = self._directory.files / name
            path.write_text(text)
            path.chmod(0o755)
        return {FILES: Shown(source=str(self._directory.files), read_only=True)} if made else {}

    def isolate(self, mounts: Mounts) -> Isolation:
        """Mount the Datastores, and return how the replicas are isolated with them. Errors: DatastoreError."""
        engine = find_engine() if self._submitter.container else ""
        shown = mounts.mount(self._job, self._manifest, for_others=engine == "docker" and os.geteuid() != 0)
        shown |= self._framework_files()
        self._check_working_dir(shown, engine)
        return self._containers(shown, engine) if engine else self._namespaces(shown)

    def _containers(self, shown: dict[str, Shown], engine: str) -> Container:
        self._directory.write_engine(engine)
        container = Container(engine=engine, shown=shown, working_dir=self._job.spec.working_dir)
        container.check()
        return container

    def _namespaces(self, shown: dict[str, Shown]) -> Namespaces:
        submitted_in = self._submitter.directory
        wanted = self._job.spec.working_dir
        if wanted and sandbox.to_source(wanted, shown) == wanted and not os.path.isdir(wanted):
            shown[wanted] = Shown(source=submitted_in)
            self._note(f"{submitted_in} is shown at {wanted}, because this machine has no spec.workingDir")
        plan = sandbox.planned(shown, sandbox.Machine())
        for path in plan.made:
            try:
                Path(path).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DatastoreError(
                    f"TrainingJob {self._job.name}: the directory {path} can't be made on this machine: "
                    f"{error.strerror}; choose another path"
                ) from error
        inherited = self._submitter.environment
        return Namespaces(plan=plan, shown=shown, working_dir=wanted or submitted_in, inherited=inherited)

    def _check_working_dir(self, shown: dict[str, Shown], engine: str) -> None:
        """Errors: InvalidManifest when spec.workingDir can't be a directory; where it is missing, it may be shown yet,
        and with an engine the image may have it."""
        if wanted := self._job.spec.working_dir:
            seen = sandbox.followed(wanted, shown)
            source = sandbox.to_source(seen, shown)
            in_datastore = source != seen or sandbox.to_source(wanted, shown) != wanted
            if not os.path.isdir(source) and (in_datastore or (os.path.lexists(wanted) and not engine)):
                raise InvalidManifest(
                    f"TrainingJob {self._job.name}: spec.workingDir: {wanted} is no directory"
                    f"{' of a Datastore; make it there first' if in_datastore else ' of this machine'}"
                )

    def check(self, task: Task, isolation: Isolation) -> None:
        """Check that the command of a task can be started. Errors: DatastoreError."""
        run = self.run_of(task)
        if isinstance(isolation, Namespaces):
            try:
                isolation.check(run)
            except DatastoreError as error:
                hint = "; --local runs this machine's programs, --container those of the image" if run.image else ""
                where = f"TrainingJob {self._job.name}: the command of {task.name}"
                raise DatastoreError(f"{where}: {error}{hint}") from None
        elif not run.image:
            raise InvalidManifest(f"TrainingJob {self._job.name}: spec.image is missing, which --container runs")

    def run_of(self, task: Task, devices: Sequence[Gpu] = (), restarts: int = 0) -> Run:
        """Return what a task runs on these GPUs. Errors: InvalidManifest."""
        variables = of_task(self.topology, self._job, task, self._lookup, self._token)
        command = command_of(self.topology, self._job, task, variables)
        role = role_of(self._job.spec, task.role)
        arguments = [] if command else [expand(word, variables) for word in role.args or []]
        words = "".join([*command, *arguments])
        given = {**{f"variable {name}": value for name, value in variables.items()}, "its command": words}
        for what, text in given.items():
            if "\0" in text:
                raise InvalidManifest(
                    f"TrainingJob {self._job.name}: {what} holds a NUL character, which no program can be given"
                )
        if command and not command[0].strip():
            raise InvalidManifest(f"TrainingJob {self._job.name}: its command begins with an empty word, not a program")
        return Run(
            unique=f"{self._job.name}-{task.name}-{restarts}-{os.getpid()}",
            job=f"{self._job.namespace}-{self._job.name}",
            command=command,
            arguments=arguments,
            variables={**gpus.variables(list(devices)), "DATASTORE_RUN": self.run_id, **variables},
            gpus=devices,
            image=role.image or "",
            limits=self.limits(task),
        )

    def limits(self, task: Task) -> Limits:
        """Return what a replica of the task can't exceed."""
        resources = role_of(self._job.spec, task.role).resources
        limits = resources.limits if resources else {}
        return Limits(
            processors=float(exact_quantity(limits["cpu"])) if "cpu" in limits else None,
            memory_bytes=parse_quantity(limits["memory"]) if "memory" in limits else None,
        )

    def _lookup(self, variable: EnvironmentVariable) -> str | None:
        """Return the value of a valueFrom variable, from the Secrets of the job's file, the only source on a laptop."""
        assert variable.value_from is not None
        wanted = variable.value_from.secret_key_ref
        where = f"TrainingJob {self._job.name}: variable {variable.name}"
        if wanted is None:
            raise InvalidManifest(f"{where}: only secretKeyRef can be had on this machine")
        for secret in self._manifest.secrets:
            if (secret.name, secret.namespace) == (wanted.name, self._job.namespace) and wanted.key in secret.values:
                return secret.values[wanted.key].reveal()
        if wanted.optional:
            return None
        raise InvalidManifest(f"{where}: no Secret {wanted.name} with the key {wanted.key} is in the file")


def free_port(taken: set[int]) -> int:
    """Return a port of 127.0.0.1 that is free now and not in `taken`. Errors: DatastoreError when none was found."""
    for _ in range(1000):
        port = random.randrange(_FIRST_PORT, _LAST_PORT)  # noqa: S311  (no secret: it only has to be free)
        with socket.socket() as probe:
            if port not in taken:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
    raise DatastoreError(f"no port of 127.0.0.1 between {_FIRST_PORT} and {_LAST_PORT} is free")
