"""The evidence that is kept after the end of a training: exit codes, times, the ends of the logs, and resource usage.
Pure, and the same for every launcher."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from datastore.api.fields import Part
from datastore.api.status import Count, Timestamp
from datastore.api.trainingjob import RoleName
from datastore.metering import Usage
from datastore.training.policy import State

LOG_BYTES = 64 << 10
"""The most bytes that are kept of the end of a replica's log."""
TOTAL_BYTES = 1 << 20
"""The most bytes that the evidence of all replicas may have together: the limit of an object in etcd."""
_OVERHEAD_BYTES = 2 << 10
"""A generous estimate of the JSON of one replica without its log."""
_ESCAPED = 2
"""By how much JSON may lengthen a log: it writes a newline, a quote and a backslash as two bytes."""
WORDS_BYTES = 4 << 10
"""How many bytes of the end of a log last_words() is given; a pod's status has the last 2 KiB."""
_WORDS = 300
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION = re.compile(
    r"(?:\[\w+\]: ?)*(?:traceback : )?"
    r"((?:\w+\.)*\w*(?:Error|Exception)\b(?!:$).*|Signal \d+ .*|mpirun noticed that .*)"
)
"""The last line of a traceback, and what torchrun and mpirun say of a process that a signal ended. PyTorch and torchrun
put ranks before it. The error that torchrun itself ends with has no text, only that of the process that failed."""


class ReplicaEvidence(Part):
    """The last run of one replica, and how often the replica was started again."""

    role: RoleName = Field(description="Its role.")
    index: Count = Field(description="Its index in the role.")
    state: State = Field(description="How it ended, or what it does.")
    exit_code: int | None = Field(None, description="Exit code; 128 + N after signal N. None if it was lost or runs.")
    reason: str = Field("", description="More about a failure, e.g. OOMKilled.")
    restarts: Count = Field(0, description="How often it was started again.")
    started_at: Timestamp | None = Field(None, description="When it was last started.")
    ended_at: Timestamp | None = Field(None, description="When it ended.")
    image: str = Field("", description="Image that ran, with its digest, as its node names it.")
    gpus: list[str] = Field(default_factory=list, description="The GPUs it had.")
    usage: Usage | None = Field(None, description="What it used.")
    log: str = Field("", description="The end of its log.")

    @property
    def name(self) -> str:
        """The replica's name, such as 'worker-0'."""
        return f"{self.role}-{self.index}"


class Evidence(Part):
    """The evidence of all replicas of one job."""

    replicas: Annotated[list[ReplicaEvidence], Field(default_factory=list)] = Field(description="By role and index.")


def log_bytes(replicas: int) -> int:
    """Return how many bytes of each log to keep, so that the evidence fits into TOTAL_BYTES; at least 256."""
    share = TOTAL_BYTES // max(1, replicas) - _OVERHEAD_BYTES
    return max(256, min(LOG_BYTES, share // _ESCAPED))


def tail(log: bytes, size: int) -> str:
    """Return the last `size` bytes of a log as text, without a first line that is cut, unless no other line follows."""
    if len(log) <= size:
        return log.decode(errors="replace")
    end = log[-size:]
    cut = end.find(b"\n") + 1
    return end[cut if cut < len(end) else 0 :].decode(errors="replace")


def last_words(log: str) -> str:
    """Return the line in which the end of a failed replica's log says why: the last one that names a Python exception,
    else the last one with a letter or digit; '' when there is none. A long line is cut."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", _ESCAPE.sub("", log)) if re.search(r"\w", line)]
    raised = [found[1] for line in lines if (found := _EXCEPTION.match(line))]
    said = (raised or lines or [""])[-1]
    return said if len(said) <= _WORDS else f"{said[:_WORDS]}..."
