"""datastore.training.local.gpus: the assignment of GPUs (S-330). The GPUs are simulated, the locks are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datastore.training.local.gpus import Gpu, NotFree, TooFew, claim, variables
from tests.promises import promise

FOUR = [Gpu(index=index, uuid=f"GPU-{index}") for index in range(4)]
HOLD = """
import sys
from pathlib import Path
from datastore.training.local.gpus import Gpu, claim
held = claim({"a": 2}, [Gpu(index=index, uuid=f"GPU-{index}") for index in range(4)], Path(sys.argv[1]))
print(*[gpu.index for gpu in held.by_task["a"]], flush=True)
sys.stdin.read()
"""


def numbers(wanted: dict[str, int], place: Path, there: list[Gpu] = FOUR) -> dict[str, list[int]]:
    found = claim(wanted, there, place)
    return {task: [gpu.index for gpu in gpus] for task, gpus in found.by_task.items()}


@promise("S-330")
def test_each_task_gets_gpus_of_its_own(tmp_path: Path) -> None:
    assert numbers({"master-0": 1, "ps-0": 0, "worker-0": 2}, tmp_path) == {
        "master-0": [0],
        "ps-0": [],
        "worker-0": [1, 2],
    }


@promise("S-330")
def test_two_jobs_never_get_the_same_and_the_kernel_gives_them_back(tmp_path: Path) -> None:
    """The kernel also releases those of a killed process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0 1\n"
        first = claim({"b": 2}, FOUR, tmp_path)
        assert [gpu.index for gpu in first.by_task["b"]] == [2, 3]
        with pytest.raises(NotFree, match=rf"needs 1 GPUs, and 0 of 4 are free: GPU 0 is used by .*pid {holder.pid}"):
            claim({"c": 1}, FOUR, tmp_path)
        first.release()
        holder.kill()
    assert numbers({"c": 4}, tmp_path) == {"c": [0, 1, 2, 3]}


@promise("S-330")
def test_a_job_gets_all_of_its_gpus_or_none(tmp_path: Path) -> None:
    """A job holds no GPU that it can't use."""
    first = claim({"a": 3}, FOUR, tmp_path)
    with pytest.raises(NotFree):
        claim({"b": 2}, FOUR, tmp_path)
    assert numbers({"c": 1}, tmp_path) == {"c": [3]}
    first.release()


@promise("S-330")
def test_a_gpu_that_another_program_uses_is_not_free(tmp_path: Path) -> None:
    there = [Gpu(index=0, uuid="GPU-0", used_by="pid 7, user bob"), FOUR[1]]
    assert numbers({"a": 1}, tmp_path, there) == {"a": [1]}
    with pytest.raises(NotFree, match="GPU 0 is used by pid 7, user bob"):
        claim({"a": 2}, there, tmp_path)


@promise("S-330")
def test_a_request_for_more_gpus_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TooFew, match="needs 5 GPUs, and this machine has 4"):
        claim({"a": 2, "b": 3}, FOUR, tmp_path)
    assert claim({"a": 0}, [], tmp_path).by_task == {}


@promise("S-330")
def test_a_lock_belongs_to_any_user_who_made_it(tmp_path: Path) -> None:
    """Read access suffices to lock it, and a link is not followed."""
    numbers({"a": 1}, tmp_path)
    (lock,) = tmp_path.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o444
    lock.unlink()
    os.symlink("/etc/passwd", lock)
    with pytest.raises(OSError, match="symbolic links"):
        numbers({"a": 1}, tmp_path)


@promise("S-330")
def test_cuda_counts_as_nvml_does() -> None:
    assert variables(FOUR[1:3]) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2"}
    assert variables([])["CUDA_VISIBLE_DEVICES"] == ""
