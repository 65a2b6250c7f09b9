"""The driver for this machine. Each job is a directory (records.py), and has a launcher process while it runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from datastore.api.explain import similar
from datastore.api.manifest import Manifest
from datastore.api.trainingjob import RoleName, TrainingJob, TrainingJobStatus
from datastore.errors import DatastoreError, InvalidManifest
from datastore.mounting import unmounting, unsent, waiting
from datastore.mounting.errors import Unsynced
from datastore.mounting.records import MountRecord, all_records
from datastore.training import schedule
from datastore.training.conditions import with_condition
from datastore.training.driver import LogLine, NoSuchJob, Observed, check, check_goes_on, chosen, newest
from datastore.training.local import cgroups, gpus, logcopies, processes
from datastore.training.local.isolation import Container
from datastore.training.local.launcher import KILL_TIMEOUT_S
from datastore.training.local.records import (
    JobDirectory,
    LocalState,
    Submitter,
    all_directories,
    check_datastores,
    directory_of,
)
from datastore.training.local.replica import MAX_LOG_BYTES
from datastore.training.local.starting import removed_on_failure, start_launcher
from datastore.training.loglines import LineSplitter
from datastore.training.policy import State, TaskState, counts
from datastore.training.topology import Task, tasks_of
from datastore.units import format_count, format_size

log = logging.getLogger(__name__)

WHERE = "local"
STOP_TIMEOUT_S = unmounting.STOP_TIMEOUT_S + logcopies.STOP_TIMEOUT_S + 60.0
"""The longest wait for a launcher to end: for uploads, for the logs, and for the processes and forced unmounts."""
LOST_TIMEOUT_S = 5.0
"""How long a read-only command waits for the uploads of a job whose launcher has died."""
POLL_S = 0.05
BEGIN_TIMEOUT_S = 60.0
_NAMED = 10
"""The most names in a message."""
_READ_BYTES = 1 << 16


class LocalDriver:
    """See Driver. container: run the job's images by podman or docker instead of programs of this machine.
    say: called with a line that says for what a call waits, when that takes long."""

    def __init__(
        self,
        *,
        container: bool = False,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._say = say
        self._submitter = Submitter(
            environment=dict(os.environ if environment is None else environment),
            directory=os.getcwd(),
            container=container,
        )

    def create(self, job: TrainingJob, manifest: Manifest) -> Observed:
        """See Driver. Return when the Datastores are mounted and the processes are about to start."""
        _check(job, manifest)
        directory = directory_of(job.name, job.namespace)
        directory.make(job, manifest, self._submitter)
        with removed_on_failure(directory):
            if job.spec.suspend:
                _say_suspended(directory)
            else:
                start_launcher(directory)
        return self._observed(directory)

    def observe(self, name: str, namespace: str) -> Observed:
        """See Driver."""
        return self._observed(self._found(name, namespace))

    def observe_all(self, namespace: str | None = None) -> Sequence[Observed]:
        """See Driver. Delete jobs whose ttlSecondsAfterFinished is over, as no process runs that could do so. A job
        that can't be read or deleted is told, and does not hide the others."""
        found = []
        for directory in list(all_directories(namespace)):
            try:
                observed = self._observed(directory)
                end = observed.status.completion_time
                expires = end and schedule.expires(observed.job, end)
                if not expires or expires > datetime.now(UTC):
                    found.append(observed)
                    continue
                self.delete(observed.job.name, observed.job.namespace)
            except NoSuchJob:
                continue
            except DatastoreError as error:
                self._say(str(error))
        return found

    def suspend(self, name: str, namespace: str, *, suspended: bool) -> None:
        """See Driver."""
        directory = self._found(name, namespace)
        check_goes_on(name, directory.read_state().status.phase)
        if suspended:
            self._stop(directory, "suspend")
            # It may have finished before its launcher saw the request.
            check_goes_on(name, directory.read_state().status.phase)
        job = directory.load_job()
        spec = job.spec.model_copy(update={"suspend": suspended})
        directory.write_job(job.model_copy(update={"spec": spec}))
        if suspended:
            status = directory.read_state().status
            if _has(status, "Suspended", "NotUploaded"):
                raise Unsynced(f"TrainingJob {name}: {status.message}")
            _say_suspended(directory)
        elif not directory.alive:
            directory.write_wanted("")
            start_launcher(directory)

    def free(self, name: str, namespace: str) -> float:
        """See Driver."""
        directory = self._found(name, namespace)
        began = time.monotonic()
        self._stop(directory, "free", until_freed=True)
        return time.monotonic() - began

    def logs(
        self,
        name: str,
        namespace: str,
        role: RoleName | None = None,
        index: int | None = None,
        *,
        follow: bool = False,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """See Driver."""
        directory = self._found(name, namespace)
        job = directory.load_job()
        if job.spec.schedule is not None:
            last = directory.read_state().status.last_run
            runs = f"the last one is {last}" if last else "none was yet"
            raise DatastoreError(f"TrainingJob {name} has a schedule, and each run is a job of its own; {runs}")
        readers = [(task, _Lines(directory.log(task.name), tail)) for task in chosen(job, role, index)]
        while True:
            ended = not (follow and directory.alive)
            said = False
            new = (
                LogLine(role=task.role, index=task.index, text=text)
                for task, reader in readers
                for text in reader.new(last=ended)
            )
            for line in newest(new, tail):
                said = True
                yield line
            tail = None
            if ended:
                return
            if not said:
                time.sleep(POLL_S)

    def metrics(self, name: str, namespace: str) -> Sequence[dict[str, Any]]:
        """See Driver."""
        directory = self._found(name, namespace)
        return directory.read_state().metrics if directory.alive else []

    def delete(self, name: str, namespace: str) -> Sequence[str]:
        """See Driver."""
        directory = self._found(name, namespace)
        self._stop(directory, "delete")
        deadline = time.monotonic() + unmounting.STOP_TIMEOUT_S
        with self._told(directory, deadline):
            _sweep(directory, deadline)
        directory.remove()
        left = [(each, unsent.remaining(each.state_dir)) for each in _mounts_of(directory)]
        return [
            f"{format_count(files, 'changed file')} of Datastore {each.name} could not be uploaded; kept on disk:"
            f" `datastore unsent {each.mountpoint}` lists it, and `--save DIR` copies it elsewhere"
            for each, files in left
            if files
        ]

    def notes(self, name: str, namespace: str) -> list[str]:
        """Return what is different on this machine from a cluster, as texts for the user."""
        return self._found(name, namespace).read_state().notes

    def _told(self, directory: JobDirectory, deadline: float) -> AbstractContextManager[None]:
        """A context that says what it waits for, and until when, while a job ends."""

        def why() -> str:
            left = waiting.left_of(_mounts_of(directory))
            return left or "its processes are being ended, and its Datastores unmounted"

        return waiting.told(f"TrainingJob {directory.name}", deadline, why, self._say)

    def _found(self, name: str, namespace: str) -> JobDirectory:
        directory = directory_of(name, namespace)
        if not directory.job_file.exists():
            names = [each.name for each in all_directories(namespace)]
            near = similar(name, names)
            some = f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
            hint = f"did you mean {near}?" if near else f"it has {some}" if names else "it has none"
            raise NoSuchJob(f"there is no TrainingJob {name} on this machine; {hint}")
        return directory

    def _observed(self, directory: JobDirectory) -> Observed:
        """Return the state of a job. If its launcher has died, record that first, and remove what the launcher left."""
        job = directory.load_job()
        state = directory.read_state()
        if state.status.phase == "Scheduled" and not directory.alive:
            _say_unscheduled(directory)
            state = directory.read_state()
        if state.status.phase in ("Pending", "Running", "Restarting") and not directory.alive:
            state = directory.read_state()  # the launcher may have ended just after the first read
            if state.status.phase in ("Pending", "Running", "Restarting") and not _begins(directory, state):
                state = _lost(directory)
        return Observed(job=job, status=state.status, evidence=state.evidence, where=WHERE)

    def _stop(self, directory: JobDirectory, why: str, *, until_freed: bool = False) -> None:
        """Tell the launcher, if it lives, to end, and wait for that; until_freed: until its resources are freed."""
        if not directory.alive:
            return
        directory.write_wanted(why)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        with self._told(directory, deadline):
            while directory.alive:
                if until_freed and _has(directory.read_state().status, "ResourcesFreed"):
                    return
                if time.monotonic() > deadline:
                    raise DatastoreError(f"TrainingJob {directory.name} does not end; see {directory.launcher_log}")
                time.sleep(POLL_S)


def _check(job: TrainingJob, manifest: Manifest) -> None:
    """Check all that can be checked before anything is created. Errors: DatastoreError."""
    where = f"TrainingJob {job.name}"
    check(job)
    if job.spec.save is not None:
        try:
            manifest.check_writable(manifest.pick_store())
        except InvalidManifest as error:
            raise InvalidManifest(f"{where}: spec.save: {error}") from None
    check_datastores(job, manifest)
    tasks = tasks_of(job.spec)
    needed = sum(task.gpus for task in tasks)
    there = len(gpus.devices()) if needed else 0
    if needed > there:
        most = max(tasks, key=lambda task: task.gpus)
        raise InvalidManifest(
            f"{where}: it needs {needed} GPUs ({most.name} alone {most.gpus}), and this machine has {there}"
        )


def _begins(directory: JobDirectory, state: LocalState) -> bool:
    """Return whether the job was created so recently that its launcher may still be starting."""
    try:
        made_at = directory.job_file.stat().st_mtime
    except FileNotFoundError:
        return True  # the job was removed
    return state.status.phase == "Pending" and not state.run and time.time() - made_at < BEGIN_TIMEOUT_S


def _has(status: TrainingJobStatus, condition: str, reason: str = "") -> bool:
    """Return whether the condition is True; reason: and has this reason."""
    found = [each for each in status.conditions or [] if each.type == condition and each.status == "True"]
    return any(reason in ("", each.reason) for each in found)


def _say_suspended(directory: JobDirectory, why: str = "it is suspended") -> None:
    state = directory.read_state()
    fields = state.status.model_dump(by_alias=True, exclude_none=True, exclude={"next_run"})
    status = TrainingJobStatus.model_validate(
        {**fields, "phase": "Suspended", "message": f"{why}; `datastore job resume` lets it run"}
    )
    directory.write_state(state.model_copy(update={"status": status}))


def _say_unscheduled(directory: JobDirectory) -> None:
    """Record that nothing waits for the times of a schedule any more; do nothing if a launcher lives after all."""
    lock = directory.lock()
    if lock is None:
        return
    try:
        if directory.read_state().status.phase == "Scheduled":
            why = directory.read_failure()
            ended = f"its schedule failed: {why}" if why else "its schedule was ended, or this machine went down"
            with suppress(OSError):  # as on a full disk: a later command records it
                _say_suspended(directory, ended)
    finally:
        os.close(lock)


def _lost(directory: JobDirectory) -> LocalState:
    """Return and record that the launcher of a job has died, and remove what it left; if a launcher lives after all,
    only return the state."""
    lock = directory.lock()
    if lock is None:
        return directory.read_state()
    try:
        try:
            unsynced = _sweep(directory, time.monotonic() + LOST_TIMEOUT_S)
        except DatastoreError as error:
            unsynced = str(error)
        left = f"not all is uploaded: {unsynced}" if unsynced else "what it had written to its Datastores is there"
        state, now = directory.read_state(), datetime.now(UTC)
        why = directory.read_failure()
        reason = "LauncherFailed" if why else "LauncherLost"
        message = f"its launcher failed: {why}" if why else "its launcher was killed, or this machine went down"
        message += f"; {left}"
        conditions = with_condition(state.status.conditions or [], "Failed", True, reason, message, now)
        conditions = with_condition(conditions, "Running", False, reason, message, now)
        conditions = with_condition(conditions, "ResourcesFreed", True, reason, "", now)
        replicas = [
            each.model_copy(update={"state": State.FREED}) if each.state in (State.RUNNING, State.PENDING) else each
            for each in state.evidence.replicas
        ]
        tasks = [TaskState(task=Task(role=each.role, index=each.index), state=each.state) for each in replicas]
        fields = {
            **state.status.model_dump(by_alias=True, exclude_none=True),
            "phase": "Failed",
            "message": message,
            "completionTime": now,
            "roles": counts(tasks),
            "conditions": [each.model_dump(by_alias=True) for each in conditions],
        }
        evidence = state.evidence.model_copy(update={"replicas": replicas})
        status = TrainingJobStatus.model_validate(fields)
        state = state.model_copy(update={"status": status, "evidence": evidence, "metrics": []})
        with suppress(OSError):  # as on a full disk: a later command records it
            directory.write_state(state)
        return state
    finally:
        os.close(lock)


def _mounts_of(directory: JobDirectory) -> list[MountRecord]:
    """Return the records of the job's mounts, also of those that ended with changes which are not uploaded."""
    below = str(directory.path / "mounts") + os.sep
    return [each for each in all_records() if each.mountpoint.startswith(below)]


def _sweep(directory: JobDirectory, deadline: float) -> str:
    """Remove what a dead launcher left: containers, processes, cgroups and mounts. Return what could not be uploaded,
    or ''. Most processes ended with the launcher; a save does not, nor a bwrap that was just starting, which would wait
    for its parent forever. deadline: until when (time.monotonic()) the mounts may take to end by themselves, with their
    uploads. Errors: DatastoreError when something is still mounted then."""
    if run := directory.read_state().run:
        processes.end_with_variable("DATASTORE_RUN", run, KILL_TIMEOUT_S)
    cgroups.parents(f"{directory.path.parent.name}-{directory.name}").remove()
    if engine := directory.read_engine():
        Container(engine=engine, shown={}, working_dir=None).sweep(f"{directory.path.parent.name}-{directory.name}")
    while any(each.pids for each in _mounts_of(directory)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    unsynced = []
    for record in _mounts_of(directory):
        try:
            unmounting.unmount(record, timeout_s=max(1.0, deadline - time.monotonic()))
        except Unsynced as error:
            unsynced.append(str(error))
        except DatastoreError:
            continue  # check_unmounted() names what is still mounted
    directory.check_unmounted()
    return "; ".join(unsynced)


class _Lines:
    """Reads a growing log line by line, from the oldest part that is kept on disk. tail: from so many lines before its
    present end, or some more."""

    def __init__(self, path: Path, tail: int | None) -> None:
        self._path = path
        self._tail = tail
        self._at = -1
        self._lines = LineSplitter()

    def new(self, *, last: bool) -> Iterator[str]:
        """Yield the lines since the last call. last: also a last line without an end."""
        try:
            with self._path.open("rb", buffering=0) as log:
                if self._at < 0:
                    self._at = 0
                    self._skip(log, self._begin(log))
                log.seek(self._at)
                while chunk := log.read(_READ_BYTES):
                    # Looked at after the read: the launcher frees the space of old parts, which then read as zeros.
                    kept = _kept_from(log, self._at)
                    if kept > self._at:
                        yield from self._lines.end()
                        before = self._at
                        self._skip(log, kept)
                        gone = format_size(self._at - before)
                        yield f"[datastore] {gone} of the log are left out here: they are no longer kept"
                    else:
                        self._at += len(chunk)
                        yield from self._lines.feed(chunk)
                    log.seek(self._at)
        except FileNotFoundError:
            return
        if last:
            yield from self._lines.end()

    def _begin(self, log: BinaryIO) -> int:
        """Return the offset behind which the first wanted line begins."""
        at = os.fstat(log.fileno()).st_size
        kept, newlines = max(0, at - MAX_LOG_BYTES), 0
        if self._tail is None:
            return kept
        while at > kept and newlines <= self._tail:
            end, at = at, max(kept, at - _READ_BYTES)
            newlines += os.pread(log.fileno(), end - at, at).count(b"\n")
        return at

    def _skip(self, log: BinaryIO, offset: int) -> None:
        """Continue with the first line that begins after an offset."""
        if offset > self._at:
            log.seek(offset)
            self._at = offset + log.read(_READ_BYTES).find(b"\n") + 1


def _kept_from(log: BinaryIO, offset: int) -> int:
    """Return the first offset, from this one on, of which the disk still has the bytes."""
    try:
        return os.lseek(log.fileno(), offset, os.SEEK_DATA)
    except OSError:  # a file system without holes, or zeros up to the end
        return offset
