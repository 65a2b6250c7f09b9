"""The records of this user's jobs: each job has a directory, whether its launcher lives or not.

<state root>/jobs/<namespace>/<name>/
  job.yaml         the TrainingJob
  manifest.yaml    the file that the job came from, with its Datastores and their Secrets; only its owner can read it
  submitter.json   the submitter's environment and directory; only its owner can read it
  state.json       status, evidence and the newest figures; written by the launcher, and by commands while none lives
  wanted.json      what a command wants the launcher to do
  failure          why the launcher itself failed, if it could not write that into state.json; else empty
  engine           which of podman and docker runs the job's containers, if it has containers
  lock             locked while the launcher lives; the kernel releases the lock when the launcher dies
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from datastore import mountinfo
from datastore.api.fields import Part
from datastore.api.manifest import Manifest, parse
from datastore.api.trainingjob import KIND, TrainingJob, TrainingJobStatus
from datastore.errors import DatastoreError, InvalidManifest
from datastore.mounting.places import make_private, state_root
from datastore.privatefile import write_json, write_text
from datastore.training.driver import JobExists, NoSuchJob
from datastore.training.evidence import Evidence

_MAX_BYTES = 8 << 20
_WANTED_BYTES = 64


class LocalState(Part):
    """The content of state.json. notes: texts for the user about this run, e.g. why limits are not kept."""

    status: TrainingJobStatus = Field(description="As in a cluster.")
    evidence: Evidence = Field(description="The replicas; their logs are in files.")
    metrics: list[dict[str, Any]] = Field(default_factory=list, description="What each uses now.")
    notes: list[str] = Field(default_factory=list, description="What is different here than in a cluster.")
    run: str = Field("", description="DATASTORE_RUN of its processes: no other run of any job has the same.")


def empty_state() -> LocalState:
    """Return the state of a job that never ran."""
    return LocalState.model_validate({"status": {"phase": "Pending"}, "evidence": {"replicas": []}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """The submitter's environment and working directory. container: whether the job's images are to be run."""

    environment: dict[str, str]
    directory: str
    container: bool = False


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """The directory of one job."""

    path: Path
    job_file: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job_file", self.path / "job.yaml")

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.path.name

    @property
    def launcher_log(self) -> Path:
        """The file for the output and errors of the launcher."""
        return self.path / "launcher.log"

    @property
    def manifest_file(self) -> Path:
        """The copy of the file that the job came from, with its Datastores and their Secrets."""
        return self.path / "manifest.yaml"

    def log(self, task: str) -> Path:
        """Return the log file of a replica."""
        return self.path / "logs" / f"{task}.log"

    def mountpoint(self, datastore: str) -> Path:
        """Return the directory where a Datastore is mounted for this job."""
        return self.path / "mounts" / datastore

    @property
    def files(self) -> Path:
        """The directory with the framework's files, which the replicas see at FILES."""
        return self.path / "files"

    def make(self, job: TrainingJob, manifest: Manifest, submitter: Submitter) -> None:
        """Create the directory of a new job. Errors: JobExists; DatastoreError, and then there is no directory."""
        make_private(self.path.parent)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise JobExists(job.name) from None
        try:
            for name in ("logs", "mounts", "files"):
                (self.path / name).mkdir()
            (self.path / "lock").touch(mode=0o600)
            self.write_job(job)
            write_text(self.manifest_file, manifest.text)
            write_json(self.path / "submitter.json", asdict(submitter))
            self.write_state(empty_state())
            self.write_wanted("")
        except OSError as error:
            self.remove()
            raise DatastoreError(
                f"TrainingJob {job.name}: its record {self.path} can't be written: {error.strerror}; correct that and "
                "submit it again"
            ) from error
        except BaseException:
            self.remove()
            raise

    def write_job(self, job: TrainingJob) -> None:
        """Replace the TrainingJob in its file, without fields that were not set."""
        text = yaml.safe_dump(job.model_dump(by_alias=True, exclude_unset=True, mode="json"), sort_keys=False)
        write_text(self.job_file, text)

    def load_job(self) -> TrainingJob:
        """Read the TrainingJob. Errors: NoSuchJob; InvalidManifest when its file is damaged or of another version."""
        try:
            return parse(self.job_file.read_text(), str(self.job_file), KIND).pick_job()
        except InvalidManifest as error:
            raise InvalidManifest(
                f"TrainingJob {self.name}: its record can't be read: {error}; `datastore job delete {self.name}` "
                "removes it"
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise NoSuchJob(f"there is no TrainingJob {self.name} on this machine") from None

    def load_manifest(self) -> Manifest:
        """Read the Datastores and Secrets. Errors: InvalidManifest."""
        return parse(self.manifest_file.read_text(), str(self.manifest_file), wanted="")

    def load_submitter(self) -> Submitter:
        """Read how the job was submitted."""
        return Submitter(**json.loads((self.path / "submitter.json").read_bytes()))

    def read_state(self) -> LocalState:
        """Read state.json; return empty_state() if the file is missing or broken."""
        try:
            with (self.path / "state.json").open("rb") as file:
                return LocalState.model_validate_json(file.read(_MAX_BYTES))
        except (OSError, ValidationError):
            return empty_state()

    def write_state(self, state: LocalState) -> None:
        """Replace state.json atomically. Errors: OSError."""
        write_json(self.path / "state.json", state.model_dump(by_alias=True, exclude_none=True, mode="json"))

    def read_wanted(self) -> str:
        """Return what a command wants the launcher to end the job for: 'suspend', 'free' or 'delete'; '': nothing."""
        try:
            return str(json.loads((self.path / "wanted.json").read_bytes()).get("stop", ""))
        except (OSError, ValueError):
            return ""

    def write_wanted(self, stop: str) -> None:
        """Tell the launcher, which reads this several times a second. The text is written in place, which needs no
        room: on a full disk a job may have to be ended to make room."""
        text = json.dumps({"stop": stop}).ljust(_WANTED_BYTES)
        wish = os.open(self.path / "wanted.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(wish, text.encode(), 0)
        finally:
            os.close(wish)

    def write_engine(self, engine: str) -> None:
        """Note which of podman and docker runs the containers, as these outlive a launcher that is killed."""
        write_text(self.path / "engine", engine)

    def read_engine(self) -> str:
        """Return 'podman' or 'docker', or '' for a job without containers."""
        return _text(self.path / "engine")

    def write_failure(self, why: str) -> None:
        """Note why the launcher failed; '' when a launcher begins."""
        write_text(self.path / "failure", why)

    def read_failure(self) -> str:
        """Return why the launcher failed; '' if it lives or was killed."""
        return _text(self.path / "failure")

    def lock(self, timeout_s: float = 0.0) -> int | None:
        """Lock the job, as its launcher does while it lives. Return the lock's descriptor, or None if another process
        has it for timeout_s or the job is gone. Commands that look for a launcher hold the lock for a moment too."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)  # not made: the job may be being removed
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
        """Whether the job has a launcher that lives."""
        lock = self.lock()
        if lock is not None:
            os.close(lock)
        return lock is None and (self.path / "lock").exists()

    def check_unmounted(self) -> None:
        """Check that nothing is mounted below the directory. Errors: DatastoreError."""
        for each in mountinfo.read().mounts:
            if each.mountpoint.startswith(f"{self.path}/"):
                raise DatastoreError(
                    f"TrainingJob {self.name}: {each.mountpoint} is still mounted: `datastore umount --force "
                    f"{each.mountpoint}` unmounts it, then `datastore job delete {self.name}` removes the job"
                )

    def remove(self) -> None:
        """Delete the directory. Errors: DatastoreError when something is mounted below it; then everything stays."""
        self.check_unmounted()
        with suppress(FileNotFoundError):
            for each in (self.path / "mounts").iterdir():
                each.rmdir()  # this fails on what is mounted since, where rmtree would remove the files of the mount
        shutil.rmtree(self.path, onerror=_missing_ok)
        with suppress(OSError):
            self.path.parent.rmdir()


def jobs_root() -> Path:
    """Return the directory that has a directory for each namespace."""
    return state_root().parent / "jobs"


def directory_of(name: str, namespace: str) -> JobDirectory:
    """Return the directory of a job, which may not exist."""
    return JobDirectory(Path(os.path.realpath(jobs_root()), namespace, name))


def all_directories(namespace: str | None = None) -> Iterator[JobDirectory]:
    """Yield the directories of all jobs, or of one namespace's, by namespace and name."""
    root = Path(os.path.realpath(jobs_root()))
    with suppress(OSError):
        for space in sorted(root.iterdir()):
            if namespace in (None, space.name):
                for each in sorted(space.iterdir()):
                    if (each / "job.yaml").exists():
                        yield JobDirectory(each)


def check_datastores(job: TrainingJob, manifest: Manifest) -> None:
    """Check that all Datastores of the job are in the manifest. Errors: InvalidManifest when one is not."""
    for each in job.spec.datastores:
        try:
            manifest.pick(each.name, job.namespace)
        except InvalidManifest as error:
            raise InvalidManifest(f"TrainingJob {job.name}: spec.datastores: {error}") from None


def _text(path: Path) -> str:
    """Return the text of a file, or '' if the file does not exist."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _missing_ok(function: object, path: str, info: Any) -> None:
    if not issubclass(info[0], FileNotFoundError):
        raise info[1]
