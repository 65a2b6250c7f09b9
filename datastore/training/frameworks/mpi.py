"""MPI: a host file, and a way to start processes on other hosts that needs no sshd in the image, only python3.

The master runs the user's command (`mpirun ./program`) and takes part with ranks of its own. The workers run AGENT,
which waits for the master and starts what mpirun asks for; mpirun calls the same file in place of ssh. The agents
accept only callers that know the token that every task of the job has in DATASTORE_TOKEN.

Open MPI 4 reads OMPI_MCA_* ("mpirun(1)": MCA parameters; orte_default_hostfile, plm_rsh_agent), 5 reads PRTE_MCA_*;
MPICH and Intel MPI read HYDRA_* and I_MPI_HYDRA_* ("Using the Hydra Process Manager").
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files as package_files

from datastore.api.trainingjob import RoleName
from datastore.training.frameworks.base import FILES, Framework
from datastore.training.topology import Task, Topology

AGENT = f"{FILES}/mpi_agent.py"
HOSTS = f"{FILES}/hosts"
HOSTFILE = f"{FILES}/hostfile"
MACHINEFILE = f"{FILES}/machinefile"
LOCAL = "localhost"


def environment(topology: Topology, role: RoleName) -> dict[str, str]:
    """Return how mpirun finds the hosts and reaches them; tasks on one host use the loopback interface."""
    remote_shell = f"python3 {AGENT}"
    settings = {
        "OMPI_MCA_orte_default_hostfile": HOSTFILE,
        "OMPI_MCA_plm_rsh_agent": remote_shell,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "PRTE_MCA_prte_default_hostfile": HOSTFILE,
        "PRTE_MCA_plm_ssh_agent": remote_shell,
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "HYDRA_HOST_FILE": MACHINEFILE,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": f"{FILES}/remote_shell",
        "I_MPI_HYDRA_HOST_FILE": MACHINEFILE,
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": f"{FILES}/remote_shell",
    }
    if topology.one_host:
        settings |= {"OMPI_MCA_oob_tcp_if_include": "lo", "OMPI_MCA_btl_tcp_if_include": "lo"}
    return settings


def files(topology: Topology) -> dict[str, str]:
    """Return the lists of hosts for Open MPI and Hydra, the agents' addresses, the agent, and a script that runs it."""
    slots = {_host(topology, task): max(1, task.gpus) for task in topology.ranked}
    listening = "".join(
        f"{_host(topology, task)} {topology.address(task).host} {topology.address(task).port}\n"
        for task in topology.of("worker")
    )
    return {
        "hostfile": "".join(f"{host} slots={count}\n" for host, count in slots.items()),
        "machinefile": "".join(f"{host}:{count}\n" for host, count in slots.items()),
        "hosts": listening,
        "mpi_agent.py": package_files(__package__).joinpath("mpi_agent.py").read_text(),
        "remote_shell": f'#!/bin/sh\nexec python3 {AGENT} "$@"\n',
    }


def command(topology: Topology, role: RoleName, given: Sequence[str]) -> list[str]:
    """Return the agent for workers, which waits for the master, and the user's command for the master."""
    return ["python3", AGENT, "--serve", "$(DATASTORE_INDEX)"] if role == "worker" else list(given)


def _host(topology: Topology, task: Task) -> str:
    """Return the name of a task's host for mpirun. Tasks on one host get different names, which only AGENT resolves."""
    if topology.one_host:
        return LOCAL if task == topology.chief else f"{topology.job}-{task.name}"
    return topology.address(task).host


FRAMEWORK = Framework(
    name="mpi",
    environment=environment,
    success="chief",
    files=files,
    command=command,
    needs_token=True,
    needs_master=True,
)
