"""GPUs given out by the launcher on a real machine (S-330): `python -m pytest tests/gpu -p no:cacheprovider`.

It needs an NVIDIA driver, bwrap and this project's requirements; no store, for its data is in directories. Where there
is no GPU every test is skipped with the reason.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from datastore.training.local import gpus
from tests.promises import promise

DEVICES = gpus.devices()
pytestmark = [
    pytest.mark.skipif(not DEVICES, reason="NVML finds no GPU on this machine"),
    pytest.mark.timeout(300),
]
PATIENCE_S = 120.0
USING = """
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
assert cuda.cuInit(0) == 0, "cuInit failed"
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
print("sees", count.value, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
context, memory = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2 << 30)) == 0
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    assert cuda.cuMemsetD8_v2(memory, 1, ctypes.c_size_t(2 << 30)) == 0
    assert cuda.cuCtxSynchronize() == 0
print("done", flush=True)
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "datastore.cli", "job", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=directory,
        check=False,
    )


def submit(directory: Path, name: str, code: str, *words: str, gpu: int = 1) -> subprocess.CompletedProcess[str]:
    (directory / f"{name}.py").write_text(code)
    document = {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "framework": "none",
            "command": [sys.executable, f"{name}.py", *words],
            "roles": {"master": {"gpus": gpu}},
        },
    }
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return run(directory, "submit", "-f", f"{name}.yaml", "--local")


def get(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(directory, "get", name, "-o", "json").stdout)
    return found


def until(directory: Path, name: str, *phases: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while (found := get(directory, name))["status"]["phase"] not in phases:
        assert time.monotonic() < deadline, found["status"]
        time.sleep(0.3)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Any:
    yield tmp_path
    for each in json.loads(run(tmp_path, "list", "-o", "json").stdout):
        run(tmp_path, "delete", each["metadata"]["name"])


@promise("S-330", "S-334")
def test_a_job_sees_its_gpu_and_what_it_does_there_is_measured(place: Path) -> None:
    assert submit(place, "one", USING, "6").returncode == 0
    found = until(place, "one", "Succeeded", "Failed")
    log = run(place, "logs", "one").stdout
    assert found["status"]["phase"] == "Succeeded", log
    assert "sees 1 " in log
    usage = found["evidence"]["replicas"][0]["usage"]
    print("usage:", usage["gpu"], usage["gpuMemory"])
    assert usage["gpu"]["peak"] > 50
    assert usage["gpuMemory"]["peak"] >= 2 << 30
    assert len(found["evidence"]["replicas"][0]["gpus"]) == 1


@promise("S-330")
def test_jobs_that_need_all_of_them_take_turns(place: Path) -> None:
    """The second waits, says for whom, and starts by itself."""
    every = len(DEVICES)
    assert submit(place, "first", USING, "8", gpu=every).returncode == 0
    until(place, "first", "Running")
    assert submit(place, "second", USING, "1", gpu=every).returncode == 0
    waiting = get(place, "second")["status"]
    assert waiting["phase"] == "Pending"
    deadline = time.monotonic() + PATIENCE_S
    while "waits for GPUs" not in waiting.get("message", ""):
        assert time.monotonic() < deadline
        waiting = get(place, "second")["status"]
    print("second:", waiting["message"])
    first = until(place, "first", "Succeeded", "Failed")
    second = until(place, "second", "Succeeded", "Failed")
    assert (first["status"]["phase"], second["status"]["phase"]) == ("Succeeded", "Succeeded")
    assert second["status"]["startTime"] >= first["evidence"]["replicas"][0]["endedAt"]


@promise("S-330")
def test_a_gpu_that_a_program_uses_without_asking_is_not_given_out(place: Path) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2 << 30)) == 0
    try:
        used = [each.used_by for each in gpus.devices()]
        print("used by:", used)
        assert any(used)
        with pytest.raises(gpus.NotFree):
            gpus.claim({"a": len(DEVICES)})
    finally:
        assert cuda.cuCtxDestroy_v2(context) == 0


@promise("S-330")
def test_a_task_without_gpus_sees_none(place: Path) -> None:
    code = "import ctypes\ncuda = ctypes.CDLL('libcuda.so.1')\nprint('cuInit', cuda.cuInit(0))\n"
    assert submit(place, "none", code, gpu=0).returncode == 0
    until(place, "none", "Succeeded")
    assert run(place, "logs", "none").stdout == "cuInit 100\n"  # CUDA_ERROR_NO_DEVICE


@promise("S-330", "S-320")
def test_more_than_there_are_is_refused(place: Path) -> None:
    done = submit(place, "greedy", USING, "1", gpu=len(DEVICES) + 1)
    assert done.returncode == 2
    assert f"and this machine has {len(DEVICES)}" in done.stderr
