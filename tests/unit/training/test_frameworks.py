"""datastore.training.frameworks: what the processes are told of each other (S-322)."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from datastore.api.trainingjob import TrainingJobSpec
from datastore.errors import InvalidManifest
from datastore.training.frameworks import FRAMEWORKS, mpi
from datastore.training.topology import Topology, tasks_of
from datastore.training.variables import check_roles, command_of, of_task
from tests.promises import promise
from tests.unit.training.jobs import in_a_cluster, job, on_one_host

CLUSTER = "roles: {worker: {replicas: 2}, ps: {}, evaluator: {}}"


def variables(topology: Topology, framework: str, spec: str, name: str) -> dict[str, str]:
    (task,) = [each for each in topology.tasks if each.name == name]
    return of_task(topology, job(spec, framework), task, lambda each: None, token="t0ken")


@promise("S-322")
def test_every_framework_of_the_manifest_is_there() -> None:
    assert set(get_args(TrainingJobSpec.model_fields["framework"].annotation)) == set(FRAMEWORKS)


@promise("S-322")
@pytest.mark.parametrize(
    ("name", "type_", "index"),
    [("master-0", "chief", 0), ("ps-0", "ps", 0), ("worker-1", "worker", 1), ("evaluator-0", "evaluator", 0)],
)
def test_tf_config_names_the_cluster_and_the_task(name: str, type_: str, index: int) -> None:
    found = variables(in_a_cluster(job(CLUSTER)), "tensorflow", CLUSTER, name)
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {
            "chief": ["digits-master-0.digits:2222"],
            "worker": ["digits-worker-0.digits:2222", "digits-worker-1.digits:2222"],
            "ps": ["digits-ps-0.digits:2222"],
        },
        "task": {"type": type_, "index": index},
    }


@promise("S-322")
def test_a_single_machine_has_no_tf_config() -> None:
    assert "TF_CONFIG" not in variables(in_a_cluster(job()), "tensorflow", "", "master-0")


@promise("S-322")
def test_one_text_serves_all_tasks_of_a_role() -> None:
    """An Indexed Job has one pod template, in which only $(DATASTORE_INDEX) and $(DATASTORE_RANK) differ."""
    for name, framework in FRAMEWORKS.items():
        topology = in_a_cluster(job("roles: {worker: {replicas: 2}}", name))
        found = framework.environment(topology, "worker")
        for task in topology.of("worker"):
            plain = variables(topology, name, "roles: {worker: {replicas: 2}}", task.name)
            expected = {
                key: value.replace("$(DATASTORE_INDEX)", str(task.index)).replace(
                    "$(DATASTORE_RANK)", str(task.index + 1)
                )
                for key, value in found.items()
            }
            assert {key: plain[key] for key in expected} == expected


@promise("S-322")
def test_pytorch_has_the_variables_of_env_and_of_torchrun() -> None:
    spec = "gpus: 20, gpusPerTask: 8"
    topology = in_a_cluster(job(spec, "pytorch"))
    found = variables(topology, "pytorch", spec, "worker-1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("digits-master-0.digits", "2222")
    assert (found["RANK"], found["WORLD_SIZE"]) == ("2", "3")
    assert (found["PET_NODE_RANK"], found["PET_NNODES"], found["PET_NPROC_PER_NODE"]) == ("2", "3", "8")
    assert (found["PET_MASTER_ADDR"], found["PET_MASTER_PORT"]) == ("digits-master-0.digits", "2222")
    assert variables(topology, "pytorch", spec, "master-0")["PET_NPROC_PER_NODE"] == "4"


@promise("S-322")
def test_jax_has_its_coordinator_and_its_number() -> None:
    spec = "roles: {master: {replicas: 0}, worker: {replicas: 2}}"
    found = variables(on_one_host(job(spec, "jax")), "jax", spec, "worker-1")
    assert found["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:20000"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("2", "1")


@promise("S-322")
@pytest.mark.parametrize(("name", "role"), [("master-0", "scheduler"), ("ps-0", "server"), ("worker-1", "worker")])
def test_mxnet_has_its_scheduler_and_its_role(name: str, role: str) -> None:
    spec = "roles: {worker: {replicas: 2}, ps: {}}"
    found = variables(in_a_cluster(job(spec, "mxnet")), "mxnet", spec, name)
    assert {key: value for key, value in found.items() if key.startswith("DMLC")} == {
        "DMLC_PS_ROOT_URI": "digits-master-0.digits",
        "DMLC_PS_ROOT_PORT": "2222",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_ROLE": role,
    }


@promise("S-322")
def test_mpi_has_a_host_file_and_an_agent_in_place_of_ssh() -> None:
    spec = "gpus: 20, gpusPerTask: 8"
    made = job(spec, "mpi")
    topology = in_a_cluster(made)
    found = mpi.files(topology)
    assert found["hostfile"] == (
        "digits-master-0.digits slots=4\ndigits-worker-0.digits slots=8\ndigits-worker-1.digits slots=8\n"
    )
    assert found["hosts"].splitlines()[1] == "digits-worker-1.digits digits-worker-1.digits 2222"
    environment = variables(topology, "mpi", spec, "worker-1")
    assert environment["DATASTORE_TOKEN"] == "t0ken"
    assert environment["OMPI_MCA_plm_rsh_agent"] == "python3 /run/datastore/mpi_agent.py"
    master, _, worker = topology.tasks
    assert command_of(topology, made, master, environment) == ["python", "train.py"]
    assert command_of(topology, made, worker, environment) == ["python3", "/run/datastore/mpi_agent.py", "--serve", "1"]


@promise("S-322")
def test_none_tells_index_and_rank_only() -> None:
    found = variables(in_a_cluster(job(CLUSTER, "none")), "none", CLUSTER, "worker-1")
    assert found == {
        "DATASTORE_JOB": "digits",
        "DATASTORE_ROLE": "worker",
        "DATASTORE_INDEX": "1",
        "DATASTORE_RANK": "2",
    }


@promise("S-320")
@pytest.mark.parametrize(
    ("framework", "spec", "line"),
    [
        ("pytorch", "roles: {ps: {}}", "spec.roles.ps: pytorch has no ps; it has master, worker"),
        ("jax", "roles: {evaluator: {}}", "spec.roles.evaluator: jax has no evaluator; it has master, worker"),
        ("mpi", "roles: {master: {replicas: 0}, worker: {}}", "mpi needs the master"),
    ],
)
def test_a_role_that_the_framework_does_not_have_is_refused(framework: str, spec: str, line: str) -> None:
    made = job(spec, framework)
    with pytest.raises(InvalidManifest, match=line):
        check_roles(made, tasks_of(made.spec))
