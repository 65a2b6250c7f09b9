"""Runs one job on this machine, from its mounts to its evidence, for `datastore job submit --local`.

The launcher needs no terminal and outlives its parent. If it is killed, bwrap ends the replicas (PR_SET_PDEATHSIG), or
a shell that waits for that removes the containers; the kernel releases the flocks of the GPUs and of the job's
directory, the mounts upload what is left and end, and the user's next command that looks at the job removes the rest.
The launcher reads several times a second what commands want (wanted.json). mounts.py and setup.py do what comes before
the replicas start.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from datastore.api.trainingjob import TrainingJob, TrainingJobStatus
from datastore.errors import DatastoreError
from datastore.mounting.errors import Unsynced
from datastore.mounting.signals import SignalWatch
from datastore.training.conditions import with_condition
from datastore.training.evidence import Evidence
from datastore.training.local import cgroups, gpus, processes
from datastore.training.local.cgroups import Limits
from datastore.training.local.isolation import Isolation, Namespaces, Run
from datastore.training.local.logcopies import LogCopies
from datastore.training.local.mounts import Mounts
from datastore.training.local.records import JobDirectory, LocalState, Submitter
from datastore.training.local.replica import Replica
from datastore.training.local.saving import save
from datastore.training.local.setup import Setup, free_port
from datastore.training.policy import Finish, Release, Restart, RunPolicy, Seen, State, counts, decide, policy_of
from datastore.training.results import tensorboard_arguments
from datastore.training.topology import Task
from datastore.training.variables import check_roles

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""The seconds between SIGTERM and SIGKILL; they may be few, as a file is in its Datastore when close returns."""
KILL_TIMEOUT_S = 10.0
RECORD_TIMEOUT_S = 3600.0
RECORD_RETRY_S = 2.0
TICK_S = 0.2
SAMPLE_S = 0.5
CHECK_S = 5.0
"""How often the launcher checks whether the mounts' storage answers."""

_EndPhase = Literal["Succeeded", "Failed", "Suspended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    phase: _EndPhase
    reason: str
    message: str


@dataclass(slots=True)
class _Times:
    """Times of the run, by time.monotonic()."""

    started: float = 0.0
    trained: float | None = None
    """When the training succeeded, while the evaluator continues; None before."""
    failed: float | None = None
    """When the first replica failed since the last restart; None before."""
    sampled: float = 0.0
    checked: float = 0.0


@dataclass(slots=True)
class Launcher:
    """Runs one job once. Call prepare(), then run(), and close() in any case."""

    directory: JobDirectory
    submitter: Submitter
    watch: SignalWatch
    job: TrainingJob = field(init=False)
    _status: TrainingJobStatus = field(init=False)
    _replicas: list[Replica] = field(default_factory=list)
    _mounts: Mounts = field(init=False)
    _setup: Setup = field(init=False)
    _notes: list[str] = field(default_factory=list)
    _claim: gpus.Claim = field(default_factory=gpus.Claim)
    _cgroups: cgroups.Parents = field(default_factory=cgroups.Parents)
    _traffic: processes.Traffic = field(default_factory=processes.Traffic)
    _times: _Times = field(default_factory=_Times)
    _copies: LogCopies | None = None
    _board: Replica | None = None
    _restarts: int = 0
    _policy: RunPolicy = field(init=False)
    _isolation: Isolation = field(init=False)

    def __post_init__(self) -> None:
        self._mounts = Mounts(self.directory, self.watch)

    # The three steps.

    def prepare(self) -> None:
        """Mount the Datastores, and check all that can be checked now. Errors: DatastoreError, Interrupted."""
        self.job = self.directory.load_job()
        self._status = TrainingJobStatus.model_validate({"phase": "Pending", "restarts": 0})
        self._setup = Setup(self.directory, self.submitter, self.job, self.directory.load_manifest(), self._note)
        topology = self._setup.topology
        check_roles(self.job, topology.tasks)
        self._policy = policy_of(self.job.spec, topology)
        self._isolation = self._setup.isolate(self._mounts)
        if isinstance(self._isolation, Namespaces):
            self._cgroups = cgroups.parents(f"{self.job.namespace}-{self.job.name}")
            if self._cgroups.why_not and any(self._setup.limits(task) != Limits() for task in topology.tasks):
                self._note(f"the limits of spec.resources are not kept here: {self._cgroups.why_not}")
        self._replicas = [
            Replica(
                task=task,
                log_path=self.directory.log(task.name),
                isolation=self._isolation,
                group=self._cgroups.group(task.name),
            )
            for task in topology.tasks
        ]
        for task in topology.tasks:
            self._setup.check(task, self._isolation)
        if (place := self.job.spec.logs) is not None:
            folder = self._mounts.place(place.datastore, place.path) / self.job.name
            self._copies = LogCopies({each.log_path: folder / each.log_path.name for each in self._replicas})
        self._condition("DatastoresReady", True, "Mounted", "")
        self._record()

    def run(self) -> Ended:
        """Run the job to its end; return how it ended, failures too. Errors: OSError when that can't be recorded."""
        with self._isolation.swept(f"{self.job.namespace}-{self.job.name}"):
            try:
                ended = self._take_gpus() or self._follow()
            except (OSError, DatastoreError) as error:
                log.exception("the launcher failed")
                ended = Ended(phase="Failed", reason="LauncherFailed", message=str(error))
            return self._finish(ended)

    def close(self) -> None:
        """End, unmount and free whatever there still is, as after a failed prepare(). Idempotent."""
        self._end(self._replicas)
        self._claim.release()
        with suppress(DatastoreError):
            self._mounts.unmount(force=True)
        self._cgroups.remove()

    # While it runs.

    def _take_gpus(self) -> Ended | None:
        """Wait for the job's GPUs, and reserve all at once, since two jobs with some GPUs each might block each other.
        Return how the run ended if it was stopped first, else None."""
        wanted = {task.name: task.gpus for task in self._setup.topology.tasks}
        began, said = time.monotonic(), ""
        while True:
            try:
                self._claim = gpus.claim(wanted)
            except gpus.NotFree as error:
                late = self.job.spec.gang and time.monotonic() - began > self.job.spec.start_deadline_seconds
                if str(error) != said or late != self._holds("Starved"):
                    said = str(error)
                    self._condition("Starved", late, "NotEnoughFree" if late else "Waiting", said)
                    self._phase("Pending", f"waits for GPUs: {said}")
                if stop := self._wanted_stop():
                    return stop
                self.watch.wait([], 1.0)
                continue
            if self._holds("Starved"):
                self._condition("Starved", False, "Started", "")
            for replica in self._replicas:
                replica.gpus = self._claim.by_task.get(replica.task.name, [])
            return None

    def _follow(self) -> Ended:
        """Start the tasks and do what the run policy decides, until the job has ended or is stopped."""
        self._times.started = time.monotonic()
        self._status = self._with(startTime=datetime.now(UTC))
        self._condition("Running", True, "Started", "")
        self._phase("Running", "")
        self._start_board()
        while True:
            if stop := self._wanted_stop():
                return stop
            ended = [each for each in self._all() if each.reap()]
            if self._times.failed is None and any(each.state is State.FAILED for each in ended):
                self._times.failed = time.monotonic()
            changed = self._start_due() or bool(ended)
            decision = decide(self._policy, self._seen())
            match decision:
                case Restart():
                    self._restart(decision)
                case Release():
                    self._times.trained = time.monotonic()
                    self._end([each for each in self._replicas if each.task in decision.tasks])
                    self._phase("Running", "the training has succeeded; the evaluator continues")
                case Finish():
                    phase: Literal["Succeeded", "Failed"] = "Succeeded" if decision.succeeded else "Failed"
                    return Ended(phase=phase, reason=decision.reason, message=decision.message)
            self._check_mounts()
            if self._sample() or changed:
                self._write()
            if not changed:
                self.watch.wait([], TICK_S)

    def _seen(self) -> Seen:
        now = time.monotonic()
        return Seen(
            tasks=[each.task_state for each in self._replicas],
            restarts=self._restarts,
            running_s=now - self._times.started,
            trained_s=None if self._times.trained is None else now - self._times.trained,
            failed_s=None if self._times.failed is None else now - self._times.failed,
        )

    def _start_due(self) -> bool:
        """Start the replicas whose time has come; return whether there were any."""
        due = [each for each in self._replicas if each.start_at is not None and each.start_at <= time.monotonic()]
        for replica in due:
            replica.start(self._setup.run_of(replica.task, replica.gpus, replica.restarts))
        if due and self._status.phase == "Restarting":
            self._phase("Running", self._status.message or "")
        return bool(due)

    def _restart(self, decision: Restart) -> None:
        again = [each for each in self._replicas if each.task in decision.tasks]
        self._end([each for each in again if each.runs])
        self._restarts += 1
        self._times.failed = None
        if len(again) == len(self._replicas):
            self._setup.renew_addresses()
        for replica in again:
            replica.note(f"{decision.why}; {replica.task.name} is started again in {decision.delay_s:g} s")
            replica.state, replica.start_at = State.PENDING, time.monotonic() + decision.delay_s
            replica.restarts += 1
        self._status = self._with(restarts=self._restarts)
        self._phase("Restarting", f"{decision.why}; restart {self._restarts} of {self._policy.backoff_limit}")

    def _wanted_stop(self) -> Ended | None:
        """Return how the run ends if a command or a signal stops it, else None."""
        stop = self.directory.read_wanted()
        if stop == "delete":
            message = "`datastore job delete` has ended it, and removes it; `datastore job resume` lets it run again"
            return Ended(phase="Suspended", reason="Suspended", message=message)
        if stop == "suspend":
            return Ended(
                phase="Suspended", reason="Suspended", message="it is suspended; `datastore job resume` continues it"
            )
        if stop == "free":
            return Ended(phase="Failed", reason="Freed", message="it was ended by `free`, before it had finished")
        if (signum := self.watch.take()) is not None:
            return Ended(phase="Failed", reason="Interrupted", message=f"its launcher was ended by signal {signum}")
        return None

    def _sample(self) -> bool:
        """Measure each replica and trim its log, if the last time was SAMPLE_S ago; return whether it was."""
        now = time.monotonic()
        if now - self._times.sampled < SAMPLE_S:
            return False
        self._times.sampled = now
        table = processes.table()
        own = {each.task.name: each.pids(table) for each in self._replicas if each.runs}
        try:
            sockets = {name: processes.socket_inodes(each.pid for each in mine) for name, mine in own.items()}
            traffic = self._traffic.look(sockets)
        except OSError:
            traffic = {}
        for replica in self._replicas:
            if own.get(replica.task.name):
                replica.sample(own[replica.task.name], traffic.get(replica.task.name))
            replica.trim_log(self._copies.copied(replica.log_path) if self._copies else None)
        return True

    def _check_mounts(self) -> None:
        """Report when the storage of the mounts stops answering or answers again, if the last check was CHECK_S ago."""
        now = time.monotonic()
        if now - self._times.checked < CHECK_S:
            return
        self._times.checked = now
        trouble = self._mounts.trouble
        if bool(trouble) == self._holds("DatastoresReady"):
            self._condition("DatastoresReady", not trouble, "NotAnswering" if trouble else "Mounted", trouble)
            self._phase(self._status.phase or "Running", trouble or "its Datastores answer again")

    def _start_board(self) -> None:
        """Start a TensorBoard beside the job if spec.tensorboard wants one and it is on PATH; not with containers."""
        place = self.job.spec.tensorboard
        if place is None or not isinstance(self._isolation, Namespaces):
            return
        path = self._isolation.environment(self._setup.run_of(self._replicas[0].task)).get("PATH")
        program = shutil.which("tensorboard", path=path)
        if program is None:
            self._note("tensorboard is not on PATH, so none is run; `datastore job tensorboard` can do it later")
            return
        port = free_port({each.port for each in self._setup.topology.addresses})  # no task listens yet
        arguments = tensorboard_arguments(str(self._mounts.place(place.datastore, place.path)), port)
        board = Replica(
            task=Task(role="evaluator", index=-1),
            log_path=self.directory.log("tensorboard"),
            isolation=self._isolation,
            group=cgroups.Parents().group(""),
        )
        name = f"{self.job.name}-tensorboard-{os.getpid()}"
        variables = {"DATASTORE_RUN": self._setup.run_id}
        board.start(Run(unique=name, job=self.job.name, command=[program, *arguments], variables=variables))
        self._board = board
        self._status = self._with(tensorboard=f"http://127.0.0.1:{port}")

    # The end.

    def _all(self) -> Iterable[Replica]:
        return [*self._replicas, self._board] if self._board else self._replicas

    def _end(self, replicas: Sequence[Replica]) -> None:
        """End these replicas: SIGTERM, and SIGKILL after GRACE_S; those that wait for their start don't start."""
        running = [each for each in replicas if each.runs]
        for replica in replicas:
            if replica.runs or replica.state is State.PENDING:
                replica.state, replica.start_at = State.FREED, None
        for each in running:
            each.terminate()
        deadline = time.monotonic() + GRACE_S
        while [each for each in running if each.runs and not each.reap()] and time.monotonic() < deadline:
            self.watch.wait([], 0.02)
            self.watch.take()
        for each in running:
            each.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while [each for each in running if each.runs and not each.reap()] and time.monotonic() < deadline:
            time.sleep(0.01)

    def _finish(self, ended: Ended) -> Ended:
        """Free everything, unmount, save the result if that is wanted, and only then record how the run ended."""
        began = time.monotonic()
        if ended.phase == "Failed" and (trouble := self._mounts.trouble):
            ended = replace(ended, message=f"{ended.message}; {trouble}")
        self._sample_last()
        self._end(list(self._all()))
        if isinstance(self._isolation, Namespaces):
            # bwrap ends before the other processes of its namespace, and may leave a child if it was just starting.
            processes.end_with_variable("DATASTORE_RUN", self._setup.run_id, KILL_TIMEOUT_S)
        self._claim.release()
        self._cgroups.remove()
        seconds = time.monotonic() - began
        self._status = self._with(freedSeconds=round(seconds, 3), tensorboard=None)
        self._condition("ResourcesFreed", True, ended.reason, f"after {seconds:.2f} s")
        self._condition("Running", False, ended.reason, ended.message)
        self._phase(self._status.phase or "Running", f"{ended.message}; its Datastores are being unmounted")
        if self._copies and (why := self._copies.stop()):
            self._note(f"the logs could not be copied to spec.logs: {why}")
        unsynced: Unsynced | None = None
        for force in (False, True):  # what is left then is kept on disk, and the last error says where
            try:
                self._mounts.unmount(force=force)
            except Unsynced as error:
                unsynced = error
            except DatastoreError as error:
                self._note(f"an unmount had trouble: {error}")
        if unsynced:
            # A suspended job mounts the same directories when it is resumed, which uploads the rest.
            phase: _EndPhase = "Suspended" if ended.phase == "Suspended" else "Failed"
            ended = Ended(phase=phase, reason="NotUploaded", message=f"{ended.message}; but {unsynced}")
        if ended.phase == "Succeeded" and self.job.spec.save is not None:
            ended = self._save(ended)
        if ended.phase != "Suspended":
            self._condition(ended.phase, True, ended.reason, ended.message)
            self._status = self._with(completionTime=datetime.now(UTC))
        self._condition("Suspended", ended.phase == "Suspended", ended.reason, "")
        self._status = self._with(phase=ended.phase, message=ended.message)
        self._record_end()
        return ended

    def _save(self, ended: Ended) -> Ended:
        """Save the result as a model version; to be called when all is uploaded, as the save reads from the storage."""

        def stopped() -> bool:
            self.watch.wait([], TICK_S)
            return self.directory.read_wanted() == "delete" or self.watch.take() is not None

        assert self.job.spec.save is not None
        model = self.job.spec.save.model
        self._phase("Running", f"{ended.message}; its result is being saved as a version of the model {model}")
        try:
            saved = save(self.job, self.directory, self._setup.run_id, stopped)
        except DatastoreError as error:
            self._condition("Saved", False, "NotSaved", str(error))
            told = f"{ended.message}; but its result was not saved as a version of the model {model}: {error}"
            return Ended(phase=ended.phase, reason=ended.reason, message=told)
        self._condition("Saved", True, "Saved", saved)
        return Ended(phase="Succeeded", reason=ended.reason, message=f"{ended.message}; saved as {saved}")

    def _sample_last(self) -> None:
        self._times.sampled = 0.0
        self._sample()

    # The state that commands read.

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _with(self, **changes: object) -> TrainingJobStatus:
        dumped = self._status.model_dump(by_alias=True, exclude_none=True)
        return TrainingJobStatus.model_validate({**dumped, **changes})

    def _condition(self, kind: str, holds: bool, reason: str, message: str) -> None:
        before = self._status.conditions or []
        changed = with_condition(before, kind, holds, reason, message, datetime.now(UTC))
        self._status = self._with(conditions=[each.model_dump(by_alias=True) for each in changed])

    def _holds(self, kind: str) -> bool:
        return any(each.type == kind and each.status == "True" for each in self._status.conditions or [])

    def _phase(self, phase: str, message: str) -> None:
        self._status = self._with(phase=phase, message=message)
        self._write()

    def _write(self) -> None:
        """Record the state; if that fails, as on a full disk, the job continues and the next call records it."""
        with suppress(OSError):
            self._record()

    def _record_end(self) -> None:
        """Record how the job ended, for which a full disk may have no room now. Errors: OSError when it has none for
        RECORD_TIMEOUT_S, or until a command or a signal asks the launcher to end."""
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while True:
            try:
                return self._record()
            except OSError as error:
                asked = self.directory.read_wanted() or self.watch.take() is not None
                if asked or time.monotonic() > deadline:
                    raise
                log.warning("the end of the job can't be recorded yet: %s", error)
                self.watch.wait([], RECORD_RETRY_S)

    def _record(self) -> None:
        """Record the state. Errors: OSError."""
        status = self._with(roles=counts([each.task_state for each in self._replicas]))
        self.directory.write_state(
            LocalState(
                status=status,
                evidence=Evidence(replicas=[each.evidence() for each in self._replicas]),
                metrics=[each.metrics() for each in self._replicas if each.runs],
                notes=self._notes,
                run=self._setup.run_id,
            )
        )
