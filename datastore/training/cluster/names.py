"""What the objects of a TrainingJob are called in a cluster, and where its replicas reach each other. Pure.

The Job of a role is NAME-ROLE, so Kubernetes gives its pods the host names NAME-ROLE-INDEX (kubernetes.io/docs, "Jobs":
Indexed completion mode), which the headless Service publishes before anything runs.
"""

from __future__ import annotations

from datastore.api.names import GROUP
from datastore.api.trainingjob import TrainingJob
from datastore.training.topology import Address, Task, Topology, topology_of

JOB = f"{GROUP}/trainingjob"
"""Label of everything that is made for a TrainingJob: its name."""
ROLE = f"{GROUP}/role"
ATTEMPT = f"{GROUP}/attempt"
"""Label of the Jobs: how often all was started anew before."""
SCHEDULE = f"{GROUP}/schedule"
"""Label of a run: the TrainingJob with the schedule."""
RANK = f"{GROUP}/rank"
"""Annotation of a pod: its rank. The scheduling gate of the same name keeps it from starting until that is written."""
LOGS = f"{GROUP}/logs"
"""Annotation of a pod: where its whole log is to be written."""
BOARD = f"{GROUP}/tensorboard"
"""Label of the pod of a TensorBoard: the TrainingJob. Annotation of a TrainingJob: somebody wants a TensorBoard now, of
this directory (DATASTORE/PATH, then a space and a word of its own); of the TensorBoard's Job: for which wish it is."""
BOARD_PORT = 6006
FREE = f"{GROUP}/free"
"""Annotation of a TrainingJob: somebody wants all of it ended."""
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation and label of a pod, set by Kubernetes: its index in the role."""
CONTAINER = "main"
PORT = 2222
"""Of every replica: each has an address of its own."""
EVIDENCE_KEY = "evidence.json"
LOGGED_KEY = "pods.json"
"""In the same object: uids of the pods whose logs are in the evidence."""
USAGE_KEY = "usage.json"
"""In the same object: what the replicas use, renewed while they run (training/cluster/usage.py)."""


def service_name(job: str) -> str:
    """The headless Service: its name has to begin with a letter, that of a job need not."""
    return f"train-{job}"


def job_name(job: str, role: str) -> str:
    """The Indexed Job of a role."""
    return f"{job}-{role}"


def evidence_name(job: str) -> str:
    """The ConfigMap that stays when everything else is gone."""
    return f"{job}-evidence"


def files_name(job: str) -> str:
    """The ConfigMap with the framework's files."""
    return f"{job}-files"


def token_name(job: str) -> str:
    """The Secret with DATASTORE_TOKEN."""
    return f"{job}-token"


def board_name(job: str) -> str:
    """The Job of the TensorBoard."""
    return f"{job}-tensorboard"


def version_name(job: str, uid: str) -> str:
    """The ModelVersion of a job's save: one for each job, however often it is asked for."""
    return f"{job}-{uid[:8]}"


def cluster_topology(job: TrainingJob) -> Topology:
    """The topology of a job in a cluster."""
    service = service_name(job.name)

    def address(task: Task) -> Address:
        return Address(host=f"{job.name}-{task.name}.{service}", port=PORT)

    return topology_of(job.name, job.spec, address)
