"""Isolates a replica from the rest of the machine: in namespaces of its own, or as a container of its image."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

from datastore.errors import DatastoreError
from datastore.mounting import podman
from datastore.training.local import processes, sandbox
from datastore.training.local.cgroups import Limits
from datastore.training.local.gpus import Gpu
from datastore.training.local.sandbox import Plan, Shown

ENGINES = ("podman", "docker")
ENGINE_FAILED = 125
"""The exit code of podman run and docker run when the engine itself has failed (podman-run(1))."""
ENGINE_TIMEOUT_S = 120.0
"""The longest wait for a command of the engine. It is long, as giving up on a kill would leave the container."""
LABEL = "dev.datastore.job"
OF_ENGINE = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
)
"""Variables by which the engine finds its programs, settings and images. None of them holds a secret."""
NO_LIMITS = Limits()
_SWEEP = 'read -r ended || "$1" ps --all --quiet --filter "label=$2" | xargs -r "$1" rm --force'
"""Shell: wait for a line or the end of standard input; at its end remove all containers of the engine $1 with the label
$2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one replica runs. unique: a name that no other replica of this user has. command: [] for the image's own,
    with these arguments."""

    unique: str
    job: str
    command: Sequence[str]
    variables: Mapping[str, str]
    arguments: Sequence[str] = ()
    gpus: Sequence[Gpu] = ()
    image: str = ""
    limits: Limits = NO_LIMITS


class Isolation(Protocol):
    """Starts and ends the processes of replicas."""

    def command_line(self, run: Run) -> list[str]:
        """Return the command line to start. Its exit code is that of the command, or 128 + N after signal N."""
        ...

    def environment(self, run: Run) -> dict[str, str]:
        """Return the environment in which to start the command line."""
        ...

    def first_pid(self, process: subprocess.Popen[bytes], run: Run) -> int:
        """Return the pid of the process from which all processes of the replica descend; 0 while there is none."""
        ...

    def terminate(self, process: subprocess.Popen[bytes], run: Run) -> None:
        """Send SIGTERM to the command."""
        ...

    def kill(self, process: subprocess.Popen[bytes], run: Run) -> None:
        """Kill all processes of the replica."""
        ...

    def failure(self, run: Run, exit_code: int) -> str:
        """Return what an exit code says beyond its number, or ''."""
        ...

    def swept(self, job: str) -> AbstractContextManager[None]:
        """A context in which the job runs. If this process is killed in it, all processes of the job are ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespaces:
    """bwrap runs programs of this machine with a view of the file system and a table of processes of their own."""

    plan: Plan
    shown: Mapping[str, Shown]
    working_dir: str
    inherited: Mapping[str, str]

    def check(self, run: Run) -> None:
        """Check the command. Errors: DatastoreError when it can't be started."""
        if not run.command:
            raise DatastoreError("spec.command is missing")
        search = self.environment(run).get("PATH", os.defpath)

        def source_of(path: str) -> str:
            return sandbox.to_source(sandbox.followed(path, self.shown), self.shown)

        why = sandbox.find_program(run.command[0], search, self.working_dir, source_of)
        if why:
            raise DatastoreError(f"spec.command: {run.command[0]}: {why}")

    def command_line(self, run: Run) -> list[str]:
        """See Isolation."""
        return sandbox.command_line(self.plan, run.command, self.working_dir)

    def environment(self, run: Run) -> dict[str, str]:
        """Return the submitter's environment, overridden by the job's variables."""
        return {**self.inherited, "PWD": self.working_dir, **run.variables}

    def first_pid(self, process: subprocess.Popen[bytes], run: Run) -> int:
        """See Isolation."""
        return process.pid

    def terminate(self, process: subprocess.Popen[bytes], run: Run) -> None:
        """Send SIGTERM to the command itself, below bwrap, as an engine does to the first process of a container."""
        with suppress(ProcessLookupError):
            os.kill(processes.command_below(process.pid) or process.pid, signal.SIGTERM)

    def kill(self, process: subprocess.Popen[bytes], run: Run) -> None:
        """Kill bwrap; the processes in its namespace die with it."""
        _kill(process)

    def failure(self, run: Run, exit_code: int) -> str:
        """See Isolation."""
        return ""

    def swept(self, job: str) -> AbstractContextManager[None]:
        """See Isolation; bwrap does it (--die-with-parent)."""
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """podman or docker runs the programs of the image, in the network of the host, where the other replicas are."""

    engine: str
    shown: Mapping[str, Shown]
    working_dir: str | None

    def check(self) -> None:
        """Check that the containers see what is mounted. Errors: DatastoreError."""
        podman.check_sees(self.engine, {path: shown.source for path, shown in self.shown.items()})

    def command_line(self, run: Run) -> list[str]:
        """See Isolation. Variables are passed by name only, so that no value, maybe a secret, shows in an argument;
        only OF_ENGINE by value."""
        arguments = [
            self.engine,
            "run",
            "--rm",
            "--name",
            run.unique,
            "--network",
            "host",
            "--label",
            f"{LABEL}={run.job}",
        ]
        arguments += ["--pull", "missing"]
        for path, shown in self.shown.items():
            arguments += ["--volume", f"{shown.source}:{path}{':ro' if shown.read_only else ''}"]
        for name, value in run.variables.items():
            arguments += ["--env", f"{name}={value}" if name in OF_ENGINE else name]
        if self.working_dir:
            arguments += ["--workdir", self.working_dir]
        if run.limits.processors is not None:
            arguments += ["--cpus", f"{run.limits.processors:g}"]
        if run.limits.memory_bytes is not None:
            arguments += ["--memory", str(run.limits.memory_bytes)]
        if run.gpus and self.engine == "docker":
            arguments += ["--gpus", '"device=' + ",".join(each.uuid for each in run.gpus) + '"']
        elif run.gpus:
            for each in run.gpus:
                arguments += ["--device", f"nvidia.com/gpu={each.uuid}"]
        command = [*arguments]
        if run.command:
            command += ["--entrypoint", run.command[0]]
        return [*command, run.image, *run.command[1:], *run.arguments]

    def environment(self, run: Run) -> dict[str, str]:
        """Return our own environment, which the engine needs, and the variables that it passes to the container."""
        return {**os.environ, **{name: value for name, value in run.variables.items() if name not in OF_ENGINE}}

    def first_pid(self, process: subprocess.Popen[bytes], run: Run) -> int:
        """See Isolation; the engine is asked."""
        said = self._ask("inspect", "--format", "{{.State.Pid}}", run.unique)
        return int(said) if said.isdigit() else 0

    def terminate(self, process: subprocess.Popen[bytes], run: Run) -> None:
        """See Isolation."""
        self._ask("kill", "--signal", "TERM", run.unique)

    def kill(self, process: subprocess.Popen[bytes], run: Run) -> None:
        """See Isolation. `podman rm --force` alone would send SIGTERM again and wait 10 s."""
        self._ask("kill", "--signal", "KILL", run.unique)
        self._ask("rm", "--force", run.unique)
        _kill(process)

    def failure(self, run: Run, exit_code: int) -> str:
        """See Isolation. Both engines end with 125 when they fail themselves; a program may do so, too."""
        if exit_code != ENGINE_FAILED:
            return ""
        return f"{self.engine} probably could not pull or start the image {run.image}"

    @contextmanager
    def swept(self, job: str) -> Iterator[None]:
        """See Isolation; a shell waits for that, and removes the containers of the job."""
        command = ["sh", "-c", _SWEEP, "sh", self.engine, f"{LABEL}={job}"]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, cwd="/"
        ) as sweeper:
            try:
                yield
            finally:
                sweeper.communicate(b"\n")

    def sweep(self, job: str) -> None:
        """Remove all containers of a job whose launcher has died, if they are not removed yet."""
        for container in self._ask("ps", "--all", "--quiet", "--filter", f"label={LABEL}={job}").split():
            self._ask("rm", "--force", container)

    def _ask(self, *arguments: str) -> str:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [self.engine, *arguments], capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False
            )
            return done.stdout.strip() if done.returncode == 0 else ""
        return ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process. Popen.kill() would reap it if it has just ended, and Replica.reap() would miss its exit code."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def find_engine() -> str:
    """Return podman if it works, else docker. Errors: DatastoreError when neither works."""
    said = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            continue
        try:
            done = subprocess.run(
                [engine, "info"], capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(f"{engine}: {error}")
            continue
        if done.returncode == 0:
            return engine
        said.append(f"{engine}: {(done.stderr.strip().splitlines() or ['does not work'])[-1]}")
    raise DatastoreError(
        f"--container needs podman or docker, and none works here: {'; '.join(said) or 'none is on PATH'}"
    )
