"""The directories of examples/, each with its real framework on several processes of this machine (S-327, S-343)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.promises import promise
from tests.training.laptop import PATIENCE_S, Laptop, kill_replica

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(900)]

SYSTEM_PYTHON = "/usr/bin/python3"
ACCURATE = 0.8


def accuracy(log: str) -> float:
    """What the program says at its end."""
    return float(log.rpartition("accuracy ")[2].split()[0])


def missing(what: str) -> None:
    """In CI everything is there."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def system_python_has(*modules: str) -> None:
    """Debian's packages: the CPU build of torch, and mpi4py."""
    done = subprocess.run([SYSTEM_PYTHON, "-c", f"import {', '.join(modules)}"], capture_output=True, check=False)
    if done.returncode:
        missing(f"{SYSTEM_PYTHON} has not {', '.join(modules)}: make e2e-training installs them")


def finished(laptop: Laptop, file: Path, name: str, **more: str) -> str:
    """Submit, follow to the end, and return what was shown."""
    done = laptop.run("job", "submit", "-f", file, "--local", "--follow", **more)
    assert done.returncode == 0, done.stdout + done.stderr
    status = laptop.get(name)["status"]
    assert status["phase"] == "Succeeded"
    print(f"{name}: freed after {status['freedSeconds']} s")
    return done.stdout + done.stderr


@promise("S-343", "S-323")
def test_tensorflow_with_a_parameter_server_and_an_evaluator(laptop: Laptop) -> None:
    """The chief ends, workers and ps are freed, and the evaluator sees the last checkpoint."""
    shown = finished(laptop, laptop.example("tensorflow"), "digits-ps")
    assert accuracy(laptop.logs("digits-ps", "master")) > ACCURATE
    assert "step 300 accuracy" in laptop.logs("digits-ps", "evaluator")
    states = {
        each["role"] + str(each["index"]): each["state"] for each in laptop.get("digits-ps")["evidence"]["replicas"]
    }
    assert states == {
        "master0": "Succeeded",
        "ps0": "Freed",
        "worker0": "Freed",
        "worker1": "Freed",
        "evaluator0": "Succeeded",
    }
    assert "master-0: Running" in shown
    assert {"checkpoints/checkpoint", "checkpoints/ckpt-300.index"} <= laptop.stored()


@promise("S-343", "S-324")
def test_tensorflow_whose_parameter_server_is_killed(laptop: Laptop) -> None:
    """Its variables are lost; the chief asks for a restart by its exit code, and goes on from the last checkpoint."""
    assert laptop.run("job", "submit", "-f", laptop.example("tensorflow"), "--local", PAUSE_S="3").returncode == 0
    eventually(lambda: "step 100 loss" in laptop.logs("digits-ps", "master"), patience_s=PATIENCE_S)
    kill_replica("digits-ps", "ps-0")
    found = laptop.until("digits-ps", "Succeeded", "Failed")
    log = laptop.logs("digits-ps", "master")
    assert found["status"]["phase"] == "Succeeded", log
    replicas = {each["role"] + str(each["index"]): each for each in found["evidence"]["replicas"]}
    assert [replicas[name]["restarts"] for name in ("ps0", "master0", "worker0")] == [1, 1, 0]
    begins = [int(line.rpartition(" ")[2]) for line in log.splitlines() if "begins at step" in line]
    assert begins[-1] >= 100
    assert accuracy(log) > ACCURATE


@promise("S-343", "S-324")
def test_tensorflow_mirrored_whose_worker_is_killed(laptop: Laptop) -> None:
    """Chief and worker in step; after a kill -9 both go on from the last checkpoint, and finish."""
    file = laptop.example("tensorflow", "mirrored.yaml")
    assert laptop.run("job", "submit", "-f", file, "--local", PAUSE_S="3").returncode == 0
    # The worker is sooner than the chief, whose checkpoints count.
    eventually(lambda: "step 100 loss" in laptop.logs("digits-mirrored", "master"), patience_s=PATIENCE_S)
    kill_replica("digits-mirrored", "worker-0")
    found = laptop.until("digits-mirrored", "Succeeded", "Failed")
    log = laptop.logs("digits-mirrored", "master")
    assert found["status"]["phase"] == "Succeeded", log
    assert found["status"]["restarts"] == 1
    assert "worker-0 ended with exit code 137 (SIGKILL); master-0 is started again in 1 s" in log
    begins = [int(line.rpartition(" ")[2]) for line in log.splitlines() if "begins at step" in line]
    assert begins[0] == 0
    assert begins[1] >= 100
    assert accuracy(log) > ACCURATE
    replicas = {each["role"]: each for each in found["evidence"]["replicas"]}
    assert replicas["worker"]["restarts"] == 1
    assert replicas["worker"]["usage"]["receivedBytes"] > 10_000, "gradients go over the network"


@promise("S-343")
def test_pytorch_by_torchrun(laptop: Laptop) -> None:
    system_python_has("torch", "numpy")
    file = laptop.example("pytorch")
    # Of Debian's torch 1.13 with Python 3.11: without these two torchrun takes "no redirection" for nothing at all
    # (a flag whose value is 0 is no longer found by iteration), and fails.
    options = '--redirects, "1", --tee, "1"'
    text = file.read_text().replace("[python3,", f"[{SYSTEM_PYTHON},").replace("run, train", f"run, {options}, train")
    file.write_text(text)
    finished(laptop, file, "digits-pytorch", OMP_NUM_THREADS="1")
    log = laptop.logs("digits-pytorch")
    assert "rank 0 of 2" in log
    assert "rank 1 of 2" in log
    assert accuracy(laptop.logs("digits-pytorch", "master")) > ACCURATE
    assert "pytorch.pt" in laptop.stored()


@promise("S-343")
def test_jax_over_two_processes(laptop: Laptop) -> None:
    finished(laptop, laptop.example("jax"), "digits-jax", JAX_PLATFORMS="cpu")
    assert "process 1 of 2 has 750 pictures, 2 devices in all" in laptop.logs("digits-jax", "worker")
    assert accuracy(laptop.logs("digits-jax", "master")) > ACCURATE


@promise("S-343", "S-322")
def test_mpi_on_three_hosts_without_sshd(laptop: Laptop) -> None:
    system_python_has("mpi4py", "numpy")
    if shutil.which("mpirun") is None:
        missing("mpirun is missing: make e2e-training installs it")
    file = laptop.example("mpi")
    file.write_text(file.read_text().replace("python3, hello", f"{SYSTEM_PYTHON}, hello"))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    finished(laptop, file, "digits-mpi", **root)
    log = laptop.logs("digits-mpi", "master")
    assert log.count("hello from rank") == 3
    assert "right" in log
    assert "mpi.txt" in laptop.stored()


SHARE = """
import sys
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
batches = int(sys.argv[1])
pictures = np.load("/data/digits.npz")["pictures"].astype(np.float64)
gradient = np.zeros((64, 64))
for batch in range(world.rank, batches, world.size):
    gradient += pictures.T @ pictures
total = world.reduce(gradient, op=MPI.SUM, root=0)
if world.rank == 0:
    print("right" if np.allclose(total, batches * (pictures.T @ pictures)) else "wrong", flush=True)
"""
BATCHES = 1000


@promise("S-344")
def test_four_submits_and_one_list_are_a_benchmark(laptop: Laptop) -> None:
    """A piece of work and twice of it, each by 1 and 2 workers; processors only, each with one thread."""
    system_python_has("mpi4py", "numpy")
    if shutil.which("mpirun") is None:
        missing("mpirun is missing: make e2e-training installs it")
    jobs = {"half-by-1": (1, BATCHES), "half-by-2": (2, BATCHES), "whole-by-1": (1, 2 * BATCHES)}
    jobs["whole-by-2"] = (2, 2 * BATCHES)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPENBLAS_NUM_THREADS": "1"}
    text = laptop.example("mpi").read_text()
    (laptop.directory / "share.py").write_text(SHARE)
    for name, (workers, batches) in jobs.items():
        file = laptop.directory / f"{name}.yaml"
        command = f'mpirun, {SYSTEM_PYTHON}, share.py, "{batches}"'
        named = text.replace("name: digits-mpi", f"name: {name}").replace("mpirun, python3, hello.py", command)
        file.write_text(named.replace("worker: {replicas: 2}", f"worker: {{replicas: {workers - 1}}}"))
        assert "right" in finished(laptop, file, name, **root)
    listed = {each["metadata"]["name"]: each for each in json.loads(laptop.run("job", "list", "-o", "json").stdout)}
    assert listed.keys() == jobs.keys()
    print("JOB         WORKERS  BATCHES  SECONDS  BATCHES/S  CPU SECONDS")
    for name, (workers, batches) in jobs.items():
        status, replicas = listed[name]["status"], listed[name]["evidence"]["replicas"]
        began, ended = (datetime.fromisoformat(status[each]) for each in ("startTime", "completionTime"))
        seconds, cpu_s = (ended - began).total_seconds(), sum(each["usage"]["cpuSeconds"] for each in replicas)
        print(f"{name:10}  {workers:7}  {batches:7}  {seconds:7.1f}  {batches / seconds:9.0f}  {cpu_s:11.1f}")
        assert len(replicas) == workers
        assert seconds > 0
        assert cpu_s > 0


@promise("S-343")
def test_mxnet_with_a_server_and_two_workers(laptop: Laptop) -> None:
    python = Path(os.environ.get("MXNET_PYTHON") or Path(sys.prefix).parent / ".venv-mxnet" / "bin" / "python")
    if not python.exists():
        missing(f"{python} is missing: make e2e-training makes it")
    finished(laptop, laptop.example("mxnet"), "digits-mxnet", PATH=f"{python.parent}:{os.environ['PATH']}")
    assert "worker 1 of 2 has 750 pictures" in laptop.logs("digits-mxnet", "worker")
    assert accuracy(laptop.logs("digits-mxnet", "worker")) > ACCURATE


@promise("S-343")
def test_any_program_runs_without_a_framework(laptop: Laptop) -> None:
    finished(laptop, laptop.example("none"), "digits")
    assert accuracy(laptop.logs("digits")) > ACCURATE
    assert "model.joblib" in laptop.stored()
