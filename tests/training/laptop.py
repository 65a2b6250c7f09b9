"""Somebody's machine with a bucket of digits, on which TrainingJobs are submitted as a person does."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datastore.api.trainingjob import RoleName
from datastore.cli.job.drivers import as_json
from datastore.mounting.records import all_records
from datastore.training.local.driver import LocalDriver
from datastore.training.local.records import all_directories
from tests.servers import Server, boto_client

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = "apiVersion: datastore.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: %s}\nspec:\n"
PATIENCE_S = 400.0
"""For what takes seconds, or half a minute with a framework: it only ends a hang. The limits of the tests are above."""
KEYS = {"AWS_ACCESS_KEY_ID: demo\n": "access_key", "AWS_SECRET_ACCESS_KEY: demo-secret\n": "secret_key"}


@dataclass(frozen=True, slots=True)
class Laptop:
    """Buckets `data` (digits.npz) and `out` of a server; a directory to stand in. environment: more variables."""

    server: Server
    data: str
    out: str
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        """A verb of `datastore`, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "datastore.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=self.directory,
            env={**os.environ, **self.environment, **more},
            check=False,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """A verb that goes on."""
        return subprocess.Popen(
            [sys.executable, "-m", "datastore.cli", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env={**os.environ, **self.environment},
        )

    def submit(self, file: Path, *options: str) -> str:
        """Submit on this machine; what it said."""
        done = self.run("job", "submit", "-f", file, "--local", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def refused(self, file: Path) -> str:
        """Submit what can't run: the one line that says why. Nothing of it may stay."""
        before = left_behind()
        done = self.run("job", "submit", "-f", file, "--local")
        assert done.returncode != 0
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        assert left_behind() == before
        return errors[0]

    def get(self, name: str) -> dict[str, Any]:
        """The job as `datastore job get -o json` prints it; asked here, where it costs no process."""
        return as_json(LocalDriver().observe(name, "default"))

    def phase(self, name: str) -> str:
        """Of the job."""
        return str(self.get(name)["status"]["phase"])

    def until(self, name: str, *phases: str) -> dict[str, Any]:
        """Wait for one of these phases; the job as JSON."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.get(name))["status"]["phase"] not in phases:
            if time.monotonic() > deadline:
                raise AssertionError(f"still {found['status']}\n{self.logs(name)}")
            time.sleep(0.2)
        return found

    def logs(self, name: str, role: RoleName | None = None, index: int | None = None) -> str:
        """What its replicas wrote, or those of one role."""
        lines = list(LocalDriver().logs(name, "default", role, index))
        return "".join(f"{line.text}\n" for line in lines)

    def manifest(self, name: str, spec: str, datastores: str = "") -> Path:
        """A file with one job; spec: lines of YAML, indented by two. Its Datastores are `data` and `out`."""
        path = self.directory / f"{name}.yaml"
        path.write_text((HEAD % name) + spec.rstrip() + "\n" + (datastores or self.datastores()))
        return path

    def datastores(self) -> str:
        """Of both buckets."""
        text = ""
        for name, bucket, read_only in (("data", self.data, "true"), ("out", self.out, "false")):
            text += (
                f"---\napiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {{name: {name}}}\n"
                f"spec: {{readOnly: {read_only}, s3: {{bucket: {bucket}, endpoint: '{self.server.endpoint}', "
                "credentialsSecret: keys}}\n"
            )
        keys = f"AWS_ACCESS_KEY_ID: {self.server.access_key}, AWS_SECRET_ACCESS_KEY: {self.server.secret_key}"
        return f"{text}---\napiVersion: v1\nkind: Secret\nmetadata: {{name: keys}}\nstringData: {{{keys}}}\n"

    def example(self, framework: str, file: str = "job.yaml") -> Path:
        """A file of examples/ with this machine's server and buckets in it, beside the example's programs."""
        text = (EXAMPLES / framework / file).read_text()
        for before, after in (
            ("http://127.0.0.1:9000", self.server.endpoint),
            ("bucket: datasets", f"bucket: {self.data}"),
            ("bucket: models", f"bucket: {self.out}"),
            ("prefix: digits/", 'prefix: ""'),
            ("AWS_ACCESS_KEY_ID: demo\n", f"AWS_ACCESS_KEY_ID: {self.server.access_key}\n"),
            ("AWS_SECRET_ACCESS_KEY: demo-secret\n", f"AWS_SECRET_ACCESS_KEY: {self.server.secret_key}\n"),
        ):
            assert before in text, before
            text = text.replace(before, after)
        for program in (EXAMPLES / framework).glob("*.py"):
            (self.directory / program.name).write_text(program.read_text())
        path = self.directory / f"{framework}-{file}"
        path.write_text(text)
        return path

    def stored(self) -> set[str]:
        """The keys of what was written."""
        listed = boto_client(self.server).list_objects_v2(Bucket=self.out).get("Contents", [])
        return {each["Key"] for each in listed}


def cgroups_of(name: str) -> list[str]:
    """The cgroups of a job's replicas. Others come and go meanwhile, which os.walk does not mind."""
    walked = os.walk("/sys/fs/cgroup")
    return [at for at, _, _ in walked if "/datastore-jobs/" in at and name in os.path.basename(at)]


def left_behind() -> list[str]:
    """The jobs and the mounts that there are."""
    jobs = [f"job {each.path}" for each in all_directories()]
    return sorted(jobs + [f"mount {each.mountpoint}" for each in all_records()])


def put_digits(server: Server, bucket: str, key: str = "digits.npz") -> None:
    """The digits of the examples."""
    body = runpy.run_path(str(EXAMPLES / "put_digits.py"))["digits"]()
    boto_client(server).put_object(Bucket=bucket, Key=key, Body=body)


def pids_of(laptop: Laptop, name: str) -> list[int]:
    """The processes whose environment says that they are this job's, on this machine."""
    mark = f"DATASTORE_JOB={name}".encode()
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if mark in (each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each.name))
            except OSError:
                continue
    return found


def kill_replica(name: str, replica: str, signum: int = signal.SIGKILL) -> None:
    """End the command of one replica, as the kernel or an eviction does."""
    role, _, index = replica.rpartition("-")
    marks = {f"DATASTORE_JOB={name}".encode(), f"DATASTORE_ROLE={role}".encode(), f"DATASTORE_INDEX={index}".encode()}
    victims = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                own = marks <= set((each / "environ").read_bytes().split(b"\0"))
                if own and (each / "comm").read_text().strip() != "bwrap":
                    victims.append(int(each.name))
            except OSError:
                continue
    assert victims, f"nothing of {replica} runs"
    for pid in victims:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def kill_launcher(name: str) -> None:
    """As the kernel does for want of memory."""
    launcher = subprocess.run(
        ["pgrep", "-f", f"datastore.training.local --channel .*/{name}$"], capture_output=True, text=True, check=True
    )
    os.kill(int(launcher.stdout.split()[0]), signal.SIGKILL)


def gone(laptop: Laptop, name: str) -> bool:
    """Whether no process of a job lives, and nothing of it is mounted."""
    return not pids_of(laptop, name) and f"/{name}/mounts/" not in Path("/proc/self/mountinfo").read_text()
