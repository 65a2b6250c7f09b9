"""What is known of each job of this user: one directory, whether its launcher lives or not.

<state root>/jobs/<namespace>/<name>/
  job.yaml         the TrainingJob
  manifest.yaml    the file it came from, with its Datastores and their Secrets; only its owner can read it
  state.json       status, evidence and the newest figures; written by the launcher alone
  wanted.json      what the command wants of the launcher
  failure          why the launcher itself failed, when it could not write that into state.json; empty while it runs
  lock             held while the launcher lives; the kernel lets go of it when it dies
  logs/ mounts/ files/ launcher.log
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from datastore.api.fields import Part
from datastore.api.manifest import Manifest, parse
from datastore.api.trainingjob import KIND, TrainingJob, TrainingJobStatus
from datastore.errors import InvalidManifest
from datastore.mounting.places import make_private, state_root
from datastore.mounting.records import write_json
from datastore.training.driver import JobExists, NoSuchJob
from datastore.training.evidence import Evidence

_MAX_BYTES = 8 << 20


class LocalState(Part):
    """state.json. notes: what a person should know of this run, e.g. why there are no limits."""

    status: TrainingJobStatus = Field(description="As in a cluster.")
    evidence: Evidence = Field(description="The replicas; their logs are in files.")
    metrics: list[dict[str, Any]] = Field(default_factory=list, description="What each uses now.")
    notes: list[str] = Field(default_factory=list, description="What is different here than in a cluster.")
    run: str = Field("", description="DATASTORE_RUN of its processes: no other run of any job has the same.")


def empty_state() -> LocalState:
    """Of a job that never ran."""
    return LocalState.model_validate({"status": {"phase": "Pending"}, "evidence": {"replicas": []}})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command wants: stop is '', 'suspend', 'free' or 'delete'."""

    stop: str = ""


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """The directory of one job."""

    path: Path
    job_file: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job_file", self.path / "job.yaml")

    @property
    def name(self) -> str:
        """Of the job."""
        return self.path.name

    @property
    def launcher_log(self) -> Path:
        """What the launcher has to say."""
        return self.path / "launcher.log"

    @property
    def manifest_file(self) -> Path:
        """The file it came from, with its Datastores and their Secrets."""
        return self.path / "manifest.yaml"

    def log(self, task: str) -> Path:
        """What a replica wrote."""
        return self.path / "logs" / f"{task}.log"

    def mountpoint(self, datastore: str) -> Path:
        """Where a Datastore is mounted for this job."""
        return self.path / "mounts" / datastore

    @property
    def files(self) -> Path:
        """What the framework's processes find below FILES."""
        return self.path / "files"

    def make(self, job: TrainingJob, manifest: Manifest) -> None:
        """Errors: JobExists."""
        make_private(self.path.parent)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise JobExists(
                f"TrainingJob {job.name} exists already; `datastore job delete {job.name}` removes it"
            ) from None
        for name in ("logs", "mounts", "files"):
            (self.path / name).mkdir()
        self.write_job(job)
        _write_private(self.manifest_file, manifest.text)
        self.write_state(empty_state())

    def write_job(self, job: TrainingJob) -> None:
        """Replace the TrainingJob; only what its author wrote stands in the file."""
        text = yaml.safe_dump(job.model_dump(by_alias=True, exclude_unset=True, mode="json"), sort_keys=False)
        _write_private(self.job_file, text)

    def load_job(self) -> TrainingJob:
        """Errors: NoSuchJob."""
        try:
            return parse(self.job_file.read_text(), str(self.job_file), KIND).pick_job()
        except (FileNotFoundError, NotADirectoryError):
            raise NoSuchJob(f"there is no TrainingJob {self.name} on this machine") from None

    def load_manifest(self) -> Manifest:
        """The Datastores and Secrets. Errors: InvalidManifest."""
        return parse(self.manifest_file.read_text(), str(self.manifest_file), wanted="")

    def read_state(self) -> LocalState:
        """A broken or missing file is an empty one."""
        try:
            with (self.path / "state.json").open("rb") as file:
                return LocalState.model_validate_json(file.read(_MAX_BYTES))
        except (OSError, ValidationError):
            return empty_state()

    def write_state(self, state: LocalState) -> None:
        """Replace it as one step."""
        write_json(self.path / "state.json", state.model_dump(by_alias=True, exclude_none=True, mode="json"))

    def read_wanted(self) -> Wanted:
        """What the command wants now."""
        try:
            found = json.loads((self.path / "wanted.json").read_bytes())
            return Wanted(str(found.get("stop", "")))
        except (OSError, ValueError):
            return Wanted()

    def write_wanted(self, wanted: Wanted) -> None:
        """The launcher looks several times a second."""
        write_json(self.path / "wanted.json", {"stop": wanted.stop})

    def write_engine(self, engine: str) -> None:
        """Which of podman and docker runs the containers; they outlive a launcher that is killed."""
        _write_private(self.path / "engine", engine)

    def read_engine(self) -> str:
        """'' where there are no containers."""
        return _text(self.path / "engine")

    def write_failure(self, why: str) -> None:
        """What ended the launcher; '' when one begins."""
        _write_private(self.path / "failure", why)

    def read_failure(self) -> str:
        """'' of a launcher that was killed, or lives."""
        return _text(self.path / "failure")

    def lock(self, timeout_s: float = 0.0) -> int | None:
        """Become the one launcher of this job: the descriptor that holds it, or None while another lives.

        timeout_s: who looks whether a launcher lives holds it for a moment too, which is over by then.
        """
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                os.close(lock)
                return None
            return lock

    @property
    def alive(self) -> bool:
        """Whether a launcher lives."""
        lock = self.lock()
        if lock is not None:
            os.close(lock)
        return lock is None and self.path.exists()

    def remove(self) -> None:
        """Forget the job. Nothing may be mounted below: this would reach into it."""
        for name in ("mounts",):
            with suppress(OSError):
                for each in (self.path / name).iterdir():
                    each.rmdir()  # fails where something is mounted, or left
        shutil.rmtree(self.path, onerror=_missing_ok)
        with suppress(OSError):
            self.path.parent.rmdir()


def jobs_root() -> Path:
    """Holds one directory for each namespace."""
    return state_root().parent / "jobs"


def directory_of(name: str, namespace: str) -> JobDirectory:
    """The directory of a job that there may be or not."""
    return JobDirectory(Path(os.path.realpath(jobs_root()), namespace, name))


def all_directories(namespace: str | None = None) -> Iterator[JobDirectory]:
    """Of every job, by namespace and name."""
    root = Path(os.path.realpath(jobs_root()))
    with suppress(OSError):
        for space in sorted(root.iterdir()):
            if namespace in (None, space.name):
                for each in sorted(space.iterdir()):
                    if (each / "job.yaml").exists():
                        yield JobDirectory(each)


def check_datastores(job: TrainingJob, manifest: Manifest) -> None:
    """Whether all Datastores of the job are in the manifest. Errors: InvalidManifest."""
    for each in job.spec.datastores:
        try:
            manifest.pick(each.name, job.namespace)
        except InvalidManifest as error:
            raise InvalidManifest(f"TrainingJob {job.name}: spec.datastores: {error}") from None


def _text(path: Path) -> str:
    """'' where there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    temporary.replace(path)


def _missing_ok(function: object, path: str, info: Any) -> None:
    if not issubclass(info[0], FileNotFoundError):
        raise info[1]
