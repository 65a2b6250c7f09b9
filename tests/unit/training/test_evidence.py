"""datastore.training.evidence and usage: what is left of a training (S-331, S-334)."""

from __future__ import annotations

import json

import pytest

from datastore.training.evidence import LOG_BYTES, TOTAL_BYTES, Evidence, ReplicaEvidence, last_words, log_bytes, tail
from tests.promises import promise


@promise("S-331")
@pytest.mark.parametrize("replicas", [1, 4, 13, 100, 1000])
def test_all_of_it_fits_into_one_object(replicas: int) -> None:
    """Whatever the logs hold; a newline is two bytes of JSON. A few have 64 KiB each."""
    assert log_bytes(4) == LOG_BYTES == 64 << 10
    log = tail(b"\n" * (LOG_BYTES * 2), log_bytes(replicas))
    ended = {"role": "worker", "state": "Failed", "log": log}
    each = [ReplicaEvidence.model_validate({**ended, "index": index}) for index in range(replicas)]
    found = Evidence(replicas=each)
    assert len(json.dumps(found.model_dump(by_alias=True, mode="json", exclude_none=True))) <= TOTAL_BYTES


@promise("S-331")
def test_the_end_of_a_log_begins_with_a_line() -> None:
    assert tail(b"first\nsecond\nthird\n", 14) == "second\nthird\n"
    assert tail(b"short\n", 14) == "short\n"
    assert tail(b"x" * 20, 14) == "x" * 14


TORCHRUN = """step 1
%sERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 3)
Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
train.py FAILED
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 3)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
============================================================
"""
"""The end of a log when a process fails that torchrun started."""


@promise("S-331")
@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "step 1\nTraceback (most recent call last):\nModuleNotFoundError: No module named 'a'\nbye\n",
            "ModuleNotFoundError: No module named 'a'",
        ),
        ("AssertionError\nbye\n", "AssertionError"),
        ("[rank1]: ValueError: bad\n====\n", "ValueError: bad"),
        ("torch.distributed.DistBackendError: NCCL\n", "torch.distributed.DistBackendError: NCCL"),
        ("\x1b[31m 10%\r 20%\x1b[0m\r\n\n", "20%"),
        ("20%\n----\n", "20%"),
        ("x" * 1000, "x" * 300 + "..."),
        ("\n", ""),
        (
            "-----\nmpirun noticed that rank 0 exited on signal 9 (Killed).\n-----\nbye\n",
            "mpirun noticed that rank 0 exited on signal 9 (Killed).",
        ),
        (TORCHRUN % "[default0]:ValueError: bad\n", "ValueError: bad"),
        (
            TORCHRUN.replace("To enable traceback see: https://pytorch.org", "Signal 9 (SIGKILL) received by PID 3")
            % "",
            "Signal 9 (SIGKILL) received by PID 3",
        ),
    ],
)
def test_a_log_says_why_its_replica_failed(log: str, said: str) -> None:
    assert last_words(log) == said
