"""The names of a TrainingJob's objects, labels and annotations in a cluster, and its replicas' addresses. Pure.

The Job of a role is named NAME-ROLE, so Kubernetes gives its pods the host names NAME-ROLE-INDEX (kubernetes.io/docs,
"Jobs": Indexed completion mode), which the headless Service publishes before the pods are ready.
"""

from __future__ import annotations

from datastore.api.names import GROUP
from datastore.api.trainingjob import TrainingJob
from datastore.training.topology import Address, Task, Topology, topology_of

JOB = f"{GROUP}/trainingjob"
"""Label of the objects that are made for a TrainingJob: its name."""
ROLE = f"{GROUP}/role"
ATTEMPT = f"{GROUP}/attempt"
"""Label of the Jobs and pods: how often all replicas together were restarted before these were made."""
SCHEDULE = f"{GROUP}/schedule"
"""Label of a TrainingJob that a schedule made: the name of the TrainingJob with the schedule."""
RANK = f"{GROUP}/rank"
"""Annotation of a pod: its rank. A scheduling gate of the same name holds the pod until the rank is written."""
LOGS = f"{GROUP}/logs"
"""Annotation of a pod: the Datastore and path to which its whole log is to be copied, as JSON."""
BOARD = f"{GROUP}/tensorboard"
"""Label of a TensorBoard's pod: the TrainingJob. Annotation of a TrainingJob: a user's wish for a TensorBoard now, as
DATASTORE/PATH, a space and a random word. Annotation of the TensorBoard's Job and pod: the wish that they serve."""
BOARD_PORT = 6006
FREE = f"{GROUP}/free"
"""Annotation of a TrainingJob: the time at which a user asked to end all its processes."""
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation and label of a pod, set by Kubernetes: the index in its role."""
CONTAINER = "main"
PORT = 2222
"""The port of every replica; all have the same, as each pod has its own address."""
EVIDENCE_KEY = "evidence.json"
LOGGED_KEY = "pods.json"
"""Key in the same ConfigMap: the uids of the pods whose logs are in the evidence."""
USAGE_KEY = "usage.json"
"""Key in the same ConfigMap: what the replicas use, renewed while they run (training/cluster/usage.py)."""


def service_name(job: str) -> str:
    """Return the name of the headless Service, which must begin with a letter; a job's name need not."""
    return f"train-{job}"


def job_name(job: str, role: str) -> str:
    """Return the name of the Indexed Job of a role."""
    return f"{job}-{role}"


def evidence_name(job: str) -> str:
    """Return the name of the ConfigMap with the evidence, which stays when the pods are gone."""
    return f"{job}-evidence"


def files_name(job: str) -> str:
    """Return the name of the ConfigMap with the framework's files."""
    return f"{job}-files"


def token_name(job: str) -> str:
    """Return the name of the Secret with DATASTORE_TOKEN."""
    return f"{job}-token"


def board_name(job: str) -> str:
    """Return the name of the TensorBoard's Job."""
    return f"{job}-tensorboard"


def version_name(job: str, uid: str) -> str:
    """Return the name of the ModelVersion that saves a job's result. The uid makes it the only one of this job."""
    return f"{job}-{uid[:8]}"


def cluster_topology(job: TrainingJob) -> Topology:
    """Return the topology of a job in a cluster."""
    service = service_name(job.name)

    def address(task: Task) -> Address:
        return Address(host=f"{job.name}-{task.name}.{service}", port=PORT)

    return topology_of(job.name, job.spec, address)
