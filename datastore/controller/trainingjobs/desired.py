"""The objects that a TrainingJob asks for. Pure: a job in, mappings out.

The TrainingJob owns all but the ModelVersion, so the cluster deletes them with it; its pods have no container of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datastore.api.datastore import API_VERSION
from datastore.api.model import VERSION_KIND
from datastore.api.names import LOGS_VOLUME, MANAGED_BY, MANAGER, USAGE_VOLUME
from datastore.api.objects import owner_reference
from datastore.api.pod import MAX_WORDS, EnvironmentVariable
from datastore.api.trainingjob import KIND, ROLES, RoleName, TrainingJob, role_of
from datastore.controller.trainingjobs.overlay import template_of
from datastore.training.cluster import names
from datastore.training.frameworks import FRAMEWORKS
from datastore.training.frameworks.base import FILES
from datastore.training.policy import FIRST_RETRIED_CODE, RunPolicy
from datastore.training.results import chief_of, command_of_result, place_of_result, tensorboard_arguments
from datastore.training.topology import RANKED, Topology

Raw = Mapping[str, Any]
JSON = dict[str, Any]

GRACE_S = 5
"""The time from SIGTERM to SIGKILL, as on a laptop: short, because a file is in its Datastore when close() returns."""
USAGE_PATH = "/run/datastore.dev/usage"
LOGS_PATH = "/run/datastore.dev/logs"
"""Mount paths of the volumes that instruct the node plugin; the kubelet sets no volume up that no container mounts."""
BOARD_RETRIES = 3
BOARD_S = 12 * 3600
_FILES_VOLUME = "framework-files"
_EXECUTABLE = 0o755


def metadata(job: TrainingJob, uid: str, name: str) -> JSON:
    """Return the metadata of an object that is made for a TrainingJob."""
    labels = {names.JOB: job.name, MANAGED_BY: MANAGER}
    owner = owner_reference(KIND, job.name, uid)
    return {"name": name, "namespace": job.namespace, "labels": labels, "ownerReferences": [owner]}


def common(job: TrainingJob, uid: str, topology: Topology, token: str) -> list[JSON]:
    """Return what all roles share: the headless Service, and the framework's files and token if it has them."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, uid, names.service_name(job.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB: job.name},
            "ports": [{"name": "training", "port": names.PORT}],
        },
    }
    made: list[JSON] = [service]
    framework = FRAMEWORKS[job.spec.framework]
    if files := framework.files(topology):
        about = metadata(job, uid, names.files_name(job.name))
        made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": dict(files)})
    if framework.needs_token:
        about = metadata(job, uid, names.token_name(job.name))
        made.append({"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": {"token": token}})
    return made


def role_job(
    job: TrainingJob,
    uid: str,
    topology: Topology,
    policy: RunPolicy,
    role: RoleName,
    claims: Mapping[str, str],
    attempt: int,
    *,
    suspended: bool,
) -> JSON:
    """Return the Indexed Job of a role. claims: by Datastore; attempt: how often all roles were restarted before.

    A failure of the program itself (exit codes 1 to 127) fails its index and leaves the others alone, so that their
    logs are still there when the run policy ends the job. After another exit code or the loss of a node, Kubernetes
    starts the index again, unless all replicas have to restart together: that is done by the controller.
    """
    template = template_of(job.spec, role)
    count = len(topology.of(role))
    about = metadata(job, uid, names.job_name(job.name, role))
    about["labels"] = {**template.labels, **about["labels"], names.ROLE: role, names.ATTEMPT: str(attempt)}
    if template.annotations:
        about["annotations"] = dict(template.annotations)
    own_codes = list(range(1, FIRST_RETRIED_CODE))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": about,
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": 0 if policy.restart == "all" else policy.backoff_limit,
            "suspend": suspended,
            "podFailurePolicy": {
                "rules": [
                    # This rule is first: an evicted pod may also have an exit code of 1 to 127.
                    {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailIndex",
                        "onExitCodes": {"containerName": names.CONTAINER, "operator": "In", "values": own_codes},
                    },
                ]
            },
            "template": {
                "metadata": {
                    "labels": {**template.labels, names.JOB: job.name, names.ROLE: role, names.ATTEMPT: str(attempt)},
                    "annotations": {**template.annotations, **_logs(job, role)},
                },
                "spec": _pod(job, topology, role, claims),
            },
        },
    }


def _logs(job: TrainingJob, role: RoleName) -> dict[str, str]:
    place = job.spec.logs
    if place is None:
        return {}
    path = "/".join(part for part in (place.path, job.name, role) if part)
    return {names.LOGS: json.dumps({"datastore": place.datastore, "path": path})}


def gated(topology: Topology, role: RoleName) -> bool:
    """Return whether a role's pods wait until the controller has written their rank, which differs from their index."""
    return topology.first_rank(role) > 0


def _pod(job: TrainingJob, topology: Topology, role: RoleName, claims: Mapping[str, str]) -> JSON:
    template = template_of(job.spec, role)
    dumped = template.model_dump(by_alias=True, exclude_none=True, mode="json")
    copied = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "priorityClassName", "schedulerName")
    spec: JSON = {
        name: dumped[name] for name in (*copied, "runtimeClassName", "serviceAccountName") if dumped.get(name)
    }
    if context := template.pod_context:
        spec["securityContext"] = context
    if "serviceAccountName" not in spec:
        spec["automountServiceAccountToken"] = False
    if template.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if gated(topology, role):
        spec["schedulingGates"] = [{"name": names.RANK}]
    volumes, mounts = _mounts(job, claims)
    if FRAMEWORKS[job.spec.framework].files(topology):
        of_files = {"name": names.files_name(job.name), "defaultMode": _EXECUTABLE}
        volumes.append({"name": _FILES_VOLUME, "configMap": of_files})
        mounts.append({"name": _FILES_VOLUME, "mountPath": FILES, "readOnly": True})
    asked = [{"path": "pod", "fieldRef": {"fieldPath": "metadata.name"}}]
    volumes.append({"name": USAGE_VOLUME, "downwardAPI": {"items": asked}})
    mounts.append({"name": USAGE_VOLUME, "mountPath": USAGE_PATH, "readOnly": True})
    if job.spec.logs is not None:
        volumes.append({"name": LOGS_VOLUME, "downwardAPI": {"items": _log_wish()}})
        mounts.append({"name": LOGS_VOLUME, "mountPath": LOGS_PATH, "readOnly": True})
    return {
        **spec,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "subdomain": names.service_name(job.name),
        "enableServiceLinks": False,
        "volumes": [*volumes, *dumped["volumes"]],
        "containers": [_container(job, topology, role, [*mounts, *dumped["volumeMounts"]])],
    }


def _log_wish() -> list[JSON]:
    """Return the files that tell the node plugin of a pod whose whole log is wanted (csi/podlogs.py)."""
    told = {
        "wanted": f"metadata.annotations['{names.LOGS}']",
        "index": f"metadata.annotations['{names.INDEX}']",
        "pod": "metadata.name",
        "namespace": "metadata.namespace",
    }
    return [{"path": path, "fieldRef": {"fieldPath": field}} for path, field in told.items()]


def _container(job: TrainingJob, topology: Topology, role: RoleName, mounts: list[JSON]) -> JSON:
    own, template = role_of(job.spec, role), template_of(job.spec, role)
    made: JSON = {
        "name": names.CONTAINER,
        "image": own.image,
        "env": environment(job, topology, role),
        "volumeMounts": mounts,
        "resources": _resources(job, topology, role),
        "ports": [{"name": "training", "containerPort": names.PORT}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    words = [*own.command, *(own.args or [])] if own.command else []
    if words := FRAMEWORKS[job.spec.framework].command(topology, role, words):
        made["command"] = list(words)
    elif own.args:
        made["args"] = list(own.args)
    optional = {
        "workingDir": job.spec.working_dir,
        "imagePullPolicy": template.image_pull_policy,
        "securityContext": template.container_context,
    }
    return made | {name: value for name, value in optional.items() if value}


def environment(job: TrainingJob, topology: Topology, role: RoleName) -> list[JSON]:
    """Return a role's variables, ours, the framework's, then the user's; each may refer to those before it."""
    framework = FRAMEWORKS[job.spec.framework]
    index = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{names.INDEX}']"}}}
    rank: JSON = {"value": "0"}
    if role in RANKED:
        rank = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{names.RANK}']"}}}
        rank = rank if gated(topology, role) else index
    found: dict[str, JSON] = {
        "DATASTORE_JOB": {"value": job.name},
        "DATASTORE_ROLE": {"value": role},
        "DATASTORE_INDEX": index,
        "DATASTORE_RANK": rank,
    }
    if framework.needs_token:
        reference = {"name": names.token_name(job.name), "key": "token"}
        found["DATASTORE_TOKEN"] = {"valueFrom": {"secretKeyRef": reference}}
    found |= {name: {"value": value} for name, value in framework.environment(topology, role).items()}
    for each in role_of(job.spec, role).env:
        found.pop(each.name, None)  # in its new place it may refer to all variables before it
        found[each.name] = _variable(each)
    return [{"name": name, **value} for name, value in found.items()]


def _variable(given: EnvironmentVariable) -> JSON:
    dumped = given.model_dump(by_alias=True, exclude_none=True, mode="json")
    return {"valueFrom": dumped["valueFrom"]} if given.value_from else {"value": given.value or ""}


def _resources(job: TrainingJob, topology: Topology, role: RoleName) -> JSON:
    wanted = role_of(job.spec, role).resources
    limits = dict(wanted.limits) if wanted else {}
    # All replicas of a role have one pod template, so a first task with fewer GPUs gets as many as the others.
    if gpus := max(task.gpus for task in topology.of(role)):
        limits[job.spec.gpu_resource] = str(gpus)
    return {"requests": dict(wanted.requests) if wanted else {}, "limits": limits}


def _mounts(job: TrainingJob, claims: Mapping[str, str]) -> tuple[list[JSON], list[JSON]]:
    volumes, mounts = [], []
    names_in_order = list(dict.fromkeys(each.name for each in job.spec.datastores))
    for number, name in enumerate(names_in_order):
        uses = [each for each in job.spec.datastores if each.name == name]
        claim = {"claimName": claims[name], "readOnly": all(each.read_only for each in uses)}
        volumes.append({"name": f"datastore-{number}", "persistentVolumeClaim": claim})
        for each in uses:
            mount = {"name": f"datastore-{number}", "mountPath": each.path, "readOnly": each.read_only}
            mounts.append(mount | ({"subPath": each.sub_path} if each.sub_path else {}))
    return volumes, mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A TensorBoard that is wanted. wish: the text of the annotation that asks for it; '' for spec.tensorboard."""

    datastore: str
    path: str
    wish: str


def board_job(job: TrainingJob, uid: str, board: Board, claim: str) -> JSON:
    """Return the Job of a TensorBoard. It listens on the pod's loopback only: a port-forward to the pod reaches it."""
    template = template_of(job.spec, chief_of(job.spec))
    dumped = template.model_dump(by_alias=True, exclude_none=True, mode="json")
    image = job.spec.tensorboard.image if job.spec.tensorboard else None
    directory = f"/datastore/{board.datastore}"
    reached = f"import socket; socket.create_connection(('127.0.0.1', {names.BOARD_PORT}), 5)"
    container = {
        "name": names.CONTAINER,
        "image": image or role_of(job.spec, chief_of(job.spec)).image,
        "command": [
            *("python3", "-m", "tensorboard.main"),
            *tensorboard_arguments(f"{directory}/{board.path}".rstrip("/"), names.BOARD_PORT),
        ],
        "env": [{"name": each.name, **_variable(each)} for each in job.spec.env],
        "volumeMounts": [{"name": "board", "mountPath": directory, "readOnly": True}, *dumped["volumeMounts"]],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "readinessProbe": {"exec": {"command": ["python3", "-c", reached]}, "timeoutSeconds": 10, "periodSeconds": 2},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    chosen = {"imagePullPolicy": template.image_pull_policy, "securityContext": template.container_context}
    spec = {name: dumped[name] for name in ("nodeSelector", "tolerations", "imagePullSecrets") if dumped.get(name)}
    spec |= {"securityContext": context} if (context := template.pod_context) else {}
    pod = {
        **spec,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "volumes": [
            {"name": "board", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            *dumped["volumes"],
        ],
        "containers": [{**container, **{name: value for name, value in chosen.items() if value}}],
    }
    about = metadata(job, uid, names.board_name(job.name))
    about["annotations"] = {names.BOARD: board.wish}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": about,
        "spec": {
            "backoffLimit": BOARD_RETRIES,
            # A TensorBoard that a user requested and forgot is ended after this time.
            **({"activeDeadlineSeconds": BOARD_S} if board.wish else {}),
            "template": {
                "metadata": {
                    "labels": {names.BOARD: job.name, MANAGED_BY: MANAGER},
                    "annotations": {names.BOARD: board.wish},
                },
                "spec": pod,
            },
        },
    }


def model_version(job: TrainingJob, uid: str, image: str) -> JSON:
    """Return the ModelVersion of spec.save. image: the image that the chief ran, with its digest, as its node names it.

    It has no owner, because a saved version outlives its job. Its name and its origin tell which job made it.
    """
    save = job.spec.save
    assert save is not None, "only a job that saves has one"
    datastore, path = place_of_result(job)
    digest = re.search(r"sha256:[0-9a-f]{64}", image)
    return {
        "apiVersion": API_VERSION,
        "kind": VERSION_KIND,
        "metadata": {
            "name": names.version_name(job.name, uid),
            "namespace": job.namespace,
            "labels": {names.JOB: job.name},
        },
        "spec": {
            "model": save.model,
            "from": {"datastore": datastore, "path": path},
            "origin": {
                "trainingJob": job.name,
                "trainingJobUID": uid,
                "imageDigest": digest[0] if digest else "",
                "command": command_of_result(job)[:MAX_WORDS],
            },
        },
    }


def roles_of(topology: Topology) -> list[RoleName]:
    """Return the roles that have replicas."""
    return [role for role in ROLES if topology.of(role)]
