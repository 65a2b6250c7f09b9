"""Runs one replica: the process of a task, its log, its cgroup and the measurement of what it uses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from datastore import ourprocess
from datastore.metering import Meter, Sample
from datastore.training.evidence import WORDS_BYTES, ReplicaEvidence, last_words
from datastore.training.local import gpus, processes
from datastore.training.local.cgroups import Group
from datastore.training.local.gpus import Gpu
from datastore.training.local.isolation import Isolation, Run
from datastore.training.local.processes import Process
from datastore.training.policy import State, TaskState
from datastore.training.topology import Task

MAX_LOG_BYTES = 32 << 20
"""The most bytes of a replica's log on disk; the disk space of older parts is freed."""
_PUNCH_HOLE_KEEP_SIZE = 3
_BLOCK = 4096
_CHUNK = 1 << 16
_LAST_OUTPUT_S = 5.0
"""The longest wait for the last output of an ended process, in case one that it left behind can't be ended."""


@dataclass(slots=True)
class Replica:
    """A task and its process, if it has one. start_at: when it is to be started (time.monotonic()), or None."""

    task: Task
    log_path: Path
    isolation: Isolation
    group: Group
    gpus: Sequence[Gpu] = ()
    state: State = State.PENDING
    start_at: float | None = 0.0
    exit_code: int | None = None
    reason: str = ""
    said: str = ""
    """What the log says about the failure."""
    restarts: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    meter: Meter = field(default_factory=Meter)
    _process: subprocess.Popen[bytes] | None = None
    _run: Run | None = None
    _logging: threading.Thread | None = None
    _began: int = 0
    """Where the output of this start begins in the log."""
    _cpu_before: float = 0.0
    """The CPU seconds of earlier starts."""

    @property
    def runs(self) -> bool:
        """Whether the task has a process that is not reaped yet."""
        return self._process is not None

    @property
    def task_state(self) -> TaskState:
        """The state of the task, for the run policy."""
        return TaskState(
            task=self.task,
            state=self.state,
            exit_code=self.exit_code,
            reason=self.reason,
            said=self.said,
            ended_at=self.ended_at,
        )

    def start(self, run: Run) -> None:
        """Start the process of the task. Errors: OSError, DatastoreError; then no process was started."""
        self.group.make(run.limits)
        command = self.group.enter(self.isolation.command_line(run))
        log = os.fdopen(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb", buffering=0)
        began = os.fstat(log.fileno()).st_size
        # A pipe, as in a container: a program that opens /dev/stderr to write a line would truncate a file.
        output, written = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                env=self.isolation.environment(run),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
                preexec_fn=ourprocess.end_with_parent,  # also while an engine still pulls an image
            )
        except BaseException:
            log.close()
            os.close(output)
            raise
        finally:
            os.close(written)
        self._logging = threading.Thread(target=_append, args=(output, log), name=f"log-{self.task.name}", daemon=True)
        self._logging.start()
        self._run = run
        self._began = began
        self.state, self.start_at = State.RUNNING, None
        self.exit_code, self.reason, self.said, self.ended_at = None, "", "", None
        self.started_at = datetime.now(UTC)

    def reap(self) -> bool:
        """Reap the process if it has ended, and note its exit code; return whether that was so."""
        if self._process is None:
            return False
        pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        if self._logging:
            self._logging.join(_LAST_OUTPUT_S)
        self.exit_code = 128 - code if code < 0 else code
        self.ended_at = datetime.now(UTC)
        if self._run:
            self.reason = self.isolation.failure(self._run, self.exit_code)
        if self.group.out_of_memory():
            self.reason = "OOMKilled"
        if self.state is not State.FREED:
            self.state = State.FAILED if self.exit_code else State.SUCCEEDED
            self.said = self._last_words() if self.exit_code else ""
        self._last_sample(used.ru_utime + used.ru_stime, used.ru_maxrss << 10)
        self._process = None
        self.group.remove()
        return True

    def _last_words(self) -> str:
        with suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(self._began, os.fstat(log.fileno()).st_size - WORDS_BYTES))
            return last_words(log.read(WORDS_BYTES).decode(errors="replace"))
        return ""

    def terminate(self) -> None:
        """Send SIGTERM to the command, if it runs."""
        if self._process and self._run:
            self.isolation.terminate(self._process, self._run)

    def kill(self) -> None:
        """Kill all processes of the replica."""
        if self._process and self._run:
            self.isolation.kill(self._process, self._run)

    def pids(self, table: dict[int, Process]) -> list[Process]:
        """Return the processes of the replica that are in this table."""
        if not (self._process and self._run):
            return []
        first = self.isolation.first_pid(self._process, self._run)
        return processes.below(first, table) if first else []

    def sample(self, own: Sequence[Process], traffic: tuple[int, int] | None) -> None:
        """Measure once what the replica uses. own: its processes. traffic: the bytes received and sent so far."""
        cpu_s, memory_bytes = self.group.cpu_s(), self.group.memory_bytes()
        load, last = gpus.load(list(self.gpus)), self.meter.last
        used_s = self._cpu_before + (sum(each.cpu_s for each in own) if cpu_s is None else cpu_s)
        self.meter.add(
            Sample(
                at_s=time.monotonic(),
                cpu_s=max(used_s, last.cpu_s if last else 0.0),  # processes that have ended are not in `own`
                memory_bytes=sum(each.memory_bytes for each in own) if memory_bytes is None else memory_bytes,
                received_bytes=traffic[0] if traffic else None,
                sent_bytes=traffic[1] if traffic else None,
                gpu_percent=load[0] if load else None,
                gpu_memory_bytes=load[1] if load else None,
            )
        )

    def _last_sample(self, cpu_s: float, memory_bytes: int) -> None:
        """Add what the ended process used in all, as wait4 told, since it may have used more after the last sample."""
        last = self.meter.last
        in_all = max(self._cpu_before + (self.group.cpu_s() or cpu_s), last.cpu_s if last else 0.0)
        self.meter.add(
            Sample(
                at_s=time.monotonic(),
                cpu_s=in_all,
                memory_bytes=last.memory_bytes if last else memory_bytes,
                received_bytes=last.received_bytes if last else None,
                sent_bytes=last.sent_bytes if last else None,
            )
        )
        self._cpu_before = in_all

    def note(self, text: str) -> None:
        """Append a line of the launcher to the log of the replica."""
        with suppress(OSError), self.log_path.open("ab") as log:
            log.write(f"[datastore] {text}\n".encode())

    def trim_log(self, copied: int | None) -> None:
        """Free the disk space of all but the last MAX_LOG_BYTES of the log. copied: the offset up to which it may be
        freed; None: no limit. A hole is punched, so that offsets of writers and readers stay valid."""
        with suppress(OSError), self.log_path.open("r+b") as log:
            end = os.fstat(log.fileno()).st_size - MAX_LOG_BYTES
            end = min(end, copied if copied is not None else end) // _BLOCK * _BLOCK
            if end > 0 and os.fstat(log.fileno()).st_blocks * 512 > MAX_LOG_BYTES + _BLOCK:
                libc = ctypes.CDLL(None, use_errno=True)
                libc.fallocate(log.fileno(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(end))

    def evidence(self) -> ReplicaEvidence:
        """Return the evidence of the replica, without its log."""
        usage = self.meter.usage()
        return ReplicaEvidence.model_validate(
            {
                "role": self.task.role,
                "index": self.task.index,
                "state": self.state,
                "exitCode": self.exit_code,
                "reason": self.reason,
                "restarts": self.restarts,
                "startedAt": self.started_at,
                "endedAt": self.ended_at,
                "gpus": [f"{each.index} ({each.name}, {each.uuid})" for each in self.gpus],
                "usage": usage,
            }
        )

    def metrics(self) -> dict[str, Any]:
        """Return the role, the index and what the replica uses now."""
        return {
            "role": self.task.role,
            "index": self.task.index,
            **{key: round(value, 3) for key, value in self.meter.now.items()},
        }


def _append(output: int, log: BinaryIO) -> None:
    """Append the content of a pipe to a log, until nobody writes there any more. Output that finds the disk full is
    lost, and the program continues."""
    with log:
        while chunk := os.read(output, _CHUNK):
            with suppress(OSError):
                log.write(chunk)
    os.close(output)
