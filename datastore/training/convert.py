"""Converts Kubeflow's TFJob, PyTorchJob, MPIJob and TrainJob to a TrainingJob and the Datastores that it needs. Pure.

The fields read are those of kubeflow.org/v1 (TFJob, PyTorchJob), kubeflow.org/v1 and v2beta1 (MPIJob) and
trainer.kubeflow.org/v1alpha1 (TrainJob). A field that has no counterpart is left out, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datastore.api.datastore import API_VERSION
from datastore.api.trainingjob import KIND, MAX_NAME
from datastore.errors import InvalidManifest

GPU = "nvidia.com/gpu"
_REPLICAS = {
    "TFJob": ("tensorflow", "tfReplicaSpecs", {"chief": "master", "master": "master", "ps": "ps", "worker": "worker"}),
    "PyTorchJob": ("pytorch", "pytorchReplicaSpecs", {"master": "master", "worker": "worker"}),
    "MPIJob": ("mpi", "mpiReplicaSpecs", {"launcher": "master", "worker": "worker"}),
}
KINDS = (*_REPLICAS, "TrainJob")
_RUNTIMES = {
    "torch": "pytorch",
    "jax": "jax",
    "mpi": "mpi",
    "deepspeed": "mpi",
    "mlx": "mpi",
    "tensorflow": "tensorflow",
}
_TEMPLATE = (
    *("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "priorityClassName", "schedulerName"),
    *("runtimeClassName", "serviceAccountName", "hostNetwork"),
)
_POD_WITHOUT = ("initContainers", "containers", "volumes", "restartPolicy", "terminationGracePeriodSeconds", *_TEMPLATE)
_S3 = re.compile(r"s3://([^/]+)/?(.*)")


@dataclass(slots=True)
class Converted:
    """documents: the YAML documents, the TrainingJob first. notes: differences that the user should check."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def convert(document: Mapping[str, Any]) -> Converted:
    """Convert one object. Errors: InvalidManifest when its kind is not one of KINDS or it has no spec."""
    kind = str(document.get("kind"))
    spec = document.get("spec")
    if kind not in KINDS or not isinstance(spec, Mapping):
        raise InvalidManifest(f"kind {kind[:64]!r} can't be converted; {', '.join(KINDS)} can")
    made = Converted()
    fields = _train_job(spec, made) if kind == "TrainJob" else _replica_job(kind, spec, made)
    metadata = document.get("metadata") or {}
    name = str(metadata.get("name", "job"))
    if len(name) > MAX_NAME or "." in name:
        shorter = name.replace(".", "-")[:MAX_NAME].strip("-")
        made.notes.append(f"the name {name} became {shorter}")
        name = shorter
    kept = {"name": name, **{key: metadata[key] for key in ("namespace", "labels") if key in metadata}}
    made.documents.insert(0, {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": fields})
    for each in made.documents[1:]:
        each["metadata"] |= {"namespace": metadata["namespace"]} if "namespace" in metadata else {}
    return made


def _replica_job(kind: str, spec: Mapping[str, Any], made: Converted) -> dict[str, Any]:
    framework, place, names = _REPLICAS[kind]
    fields: dict[str, Any] = {"framework": framework, "roles": {}}
    given = {str(name).lower(): replica for name, replica in (spec.get(place) or {}).items()}
    if "evaluator" in given:
        names = {**names, "evaluator": "evaluator"}
    for theirs, replica in given.items():
        if theirs in names:
            fields["roles"][names[theirs]] = _role(names[theirs], replica, fields, made)
        else:
            made.notes.append(f"{place}.{theirs} has no counterpart and is left out")
    if "master" not in fields["roles"]:
        fields["roles"]["master"] = {"replicas": 0}
    if kind == "MPIJob":
        _launcher(spec, fields, made)
    _hoist(fields)
    policy = {**(spec.get("runPolicy") or {}), **{key: spec[key] for key in ("suspend",) if key in spec}}
    _run_policy(policy, fields, made)
    if spec.get("successPolicy") == "AllWorkers":
        fields["success"] = "allWorkers"
    for name in ("elasticPolicy", "enableDynamicWorker", "nprocPerNode"):
        if spec.get(name):
            made.notes.append(f"{name} has no counterpart: torchrun starts one process for each GPU of a task")
    return fields


def _role(role: str, replica: Mapping[str, Any], fields: dict[str, Any], made: Converted) -> dict[str, Any]:
    template = replica.get("template") or {}
    pod = template.get("spec") or {}
    containers = pod.get("containers") or [{}]
    if len(containers) > 1:
        made.notes.append(f"{role}: of its {len(containers)} containers only {containers[0].get('name')} is taken")
    if pod.get("initContainers"):
        made.notes.append(f"{role}: initContainers are left out; a Datastore may do what they did")
    policy = replica.get("restartPolicy")
    if policy in ("OnFailure", "Always"):
        made.notes.append(
            f"{role}: restartPolicy {policy}: here exit codes of 1 to 127 fail the job, others are retried"
        )
    found = _container(containers[0], pod, fields, made)
    found["replicas"] = replica.get("replicas", 1)
    overlay = {name: pod[name] for name in _TEMPLATE if name in pod}
    metadata = template.get("metadata") or {}
    overlay |= {name: metadata[name] for name in ("labels", "annotations") if metadata.get(name)}
    for name in pod:
        if name not in _POD_WITHOUT:
            made.notes.append(f"{role}: {name} of the pod is left out")
    if overlay or "template" in found:
        found["template"] = {**found.get("template", {}), **overlay}
    return found


def _container(
    container: Mapping[str, Any], pod: Mapping[str, Any], fields: dict[str, Any], made: Converted
) -> dict[str, Any]:
    """Return the fields of a role; add the working directory and the Datastores to `fields`, as they are the job's."""
    found = {name: container[name] for name in ("image", "command", "args") if container.get(name)}
    environment = []
    for variable in container.get("env") or []:
        if "resourceFieldRef" in (variable.get("valueFrom") or {}):
            made.notes.append(f"variable {variable.get('name')}: resourceFieldRef is left out")
        else:
            environment.append(variable)
    if environment:
        found["env"] = environment
    if container.get("envFrom"):
        made.notes.append("envFrom is left out; name the variables in env")
    if container.get("workingDir"):
        fields.setdefault("workingDir", container["workingDir"])
    _resources(container.get("resources") or {}, found)
    _volumes(container, pod, found, fields, made)
    return found


def _resources(resources: Mapping[str, Any], found: dict[str, Any]) -> None:
    parts = {}
    for name in ("requests", "limits"):
        amounts = dict(resources.get(name) or {})
        if GPU in amounts:
            found["gpus"] = int(amounts.pop(GPU))
        if amounts:
            parts[name] = amounts
    if parts:
        found["resources"] = parts


def _volumes(
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    found: dict[str, Any],
    fields: dict[str, Any],
    made: Converted,
) -> None:
    """Turn each volume that is a PersistentVolumeClaim into a Datastore; keep other volumes in the role's template."""
    volumes = {each.get("name"): each for each in pod.get("volumes") or []}
    rest: dict[str, Any] = {"volumes": [], "volumeMounts": []}
    for mount in container.get("volumeMounts") or []:
        volume = volumes.get(mount.get("name"), {})
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if claim is None:
            rest["volumeMounts"].append(mount)
            if volume and volume not in rest["volumes"]:
                rest["volumes"].append(volume)
            continue
        shown = {"name": claim, "path": mount["mountPath"]}
        shown |= {"subPath": mount["subPath"].strip("/")} if mount.get("subPath") else {}
        shown |= {"readOnly": True} if mount.get("readOnly") else {}
        _mount(shown, {"claim": {"name": claim}}, fields, made)
    if rest["volumeMounts"]:
        found["template"] = {key: value for key, value in rest.items() if value}


def _mount(shown: dict[str, Any], source: dict[str, Any], fields: dict[str, Any], made: Converted) -> None:
    mounted = fields.setdefault("datastores", [])
    if shown not in mounted:
        mounted.append(shown)
    if shown["name"] not in [each["metadata"]["name"] for each in made.documents]:
        metadata = {"name": shown["name"]}
        made.documents.append({"apiVersion": API_VERSION, "kind": "Datastore", "metadata": metadata, "spec": source})


def _launcher(spec: Mapping[str, Any], fields: dict[str, Any], made: Converted) -> None:
    """Make the launcher a master that takes part in the training: drop one worker, give the master its resources."""
    roles = fields["roles"]
    worker, master = roles.get("worker"), roles["master"]
    if worker and not spec.get("runLauncherAsWorker"):
        worker["replicas"] -= 1
        for name in ("gpus", "resources"):
            if name in worker:
                master[name] = worker[name]
        made.notes.append("the launcher takes part here: there is one worker less, and the master has its resources")
    slots, gpus = spec.get("slotsPerWorker"), (worker or {}).get("gpus", 0)
    if slots and slots != max(1, gpus):
        made.notes.append(f"slotsPerWorker {slots}: a host has a slot for each GPU here, else one; see mpirun --map-by")
    if worker is not None:
        worker.pop("command", None)
        worker.pop("args", None)
    made.notes.append("no sshd is needed in the image, but python3; keys and sshAuthMountPath are left out")


def _hoist(fields: dict[str, Any]) -> None:
    """Move the fields that are equal in all roles to the job."""
    roles = fields["roles"]
    running = [each for each in roles.values() if each.get("replicas") != 0]
    for name in ("image", "command", "args", "env", "resources", "template"):
        values = [each.get(name) for each in running]
        if running and values[0] is not None and all(each == values[0] for each in values):
            fields[name] = values[0]
            for each in running:
                del each[name]
    if fields["framework"] == "mpi" and "command" in roles.get("master", {}):
        fields["command"] = roles["master"].pop("command")
        fields |= {"args": roles["master"].pop("args")} if "args" in roles["master"] else {}
    for name, role in list(roles.items()):
        if name == "worker" and role.get("replicas") == 0:
            del roles[name]


def _run_policy(policy: Mapping[str, Any], fields: dict[str, Any], made: Converted) -> None:
    for name in ("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend"):
        if policy.get(name) is not None:
            fields[name] = policy[name]
    if policy.get("cleanPodPolicy") not in (None, "All", "Running"):
        made.notes.append("cleanPodPolicy None: here everything is freed at the end, and logs and numbers stay")
    scheduling = policy.get("schedulingPolicy") or {}
    if scheduling:
        fields["gang"] = True
    if scheduling.get("priorityClass"):
        fields.setdefault("template", {})["priorityClassName"] = scheduling["priorityClass"]
    if scheduling.get("queue"):
        labels = fields.setdefault("template", {}).setdefault("labels", {})
        labels["kueue.x-k8s.io/queue-name"] = scheduling["queue"]
    for name in ("minAvailable", "minResources", "scheduleTimeoutSeconds"):
        if scheduling.get(name) is not None:
            made.notes.append(f"schedulingPolicy.{name} is left out: a gang is all replicas")


def _train_job(spec: Mapping[str, Any], made: Converted) -> dict[str, Any]:
    trainer = spec.get("trainer") or {}
    runtime = str((spec.get("runtimeRef") or {}).get("name", ""))
    framework = next((ours for word, ours in _RUNTIMES.items() if word in runtime), "none")
    if framework == "none":
        made.notes.append(
            f"runtimeRef {runtime!r}: what it sets for its processes is not known here; framework is none"
        )
    nodes = int(trainer.get("numNodes") or 1)
    fields: dict[str, Any] = {"framework": framework}
    fields |= {name: trainer[name] for name in ("image", "command", "args", "env") if trainer.get(name)}
    resources: dict[str, Any] = {}
    _resources(trainer.get("resourcesPerNode") or {}, resources)
    roles: dict[str, Any] = {"master": {}}
    roles |= {"worker": {"replicas": nodes - 1}} if nodes > 1 else {}
    for role in roles.values():
        role |= {"gpus": resources["gpus"]} if "gpus" in resources else {}
    fields |= {"resources": resources["resources"]} if "resources" in resources else {}
    fields["roles"] = roles
    missing = [name for name in ("image", "command") if name not in fields]
    made.notes += [f"trainer.{name} is not set: the runtime {runtime!r} has it; write spec.{name}" for name in missing]
    if trainer.get("numProcPerNode") not in (None, "auto", "gpu", resources.get("gpus")):
        made.notes.append(f"numProcPerNode {trainer['numProcPerNode']}: torchrun starts one process for each GPU here")
    for name, path in (("dataset", "/workspace/dataset"), ("model", "/workspace/model")):
        _initializer(name, path, (spec.get("initializer") or {}).get(name), fields, made)
    template = {name: spec[name] for name in ("labels", "annotations") if spec.get(name)}
    if template:
        fields["template"] = template
    _run_policy(spec, fields, made)
    for name in ("podTemplateOverrides", "runtimePatches", "managedBy"):
        if spec.get(name):
            made.notes.append(f"{name} is left out; spec.template and roles.*.template say what pods have besides")
    return fields


def _initializer(
    name: str, path: str, given: Mapping[str, Any] | None, fields: dict[str, Any], made: Converted
) -> None:
    if not given:
        return
    uri = str(given.get("storageUri", ""))
    found = _S3.fullmatch(uri)
    if found is None:
        made.notes.append(
            f"initializer.{name} {uri!r} is left out: put the data into a Datastore once, it is not copied"
        )
        return
    s3 = {"bucket": found[1], **({"prefix": found[2].rstrip("/") + "/"} if found[2] else {})}
    secret = (given.get("secretRef") or {}).get("name")
    s3 |= {"credentialsSecret": secret} if secret else {}
    _mount({"name": name, "path": path, "readOnly": True}, {"s3": s3, "readOnly": True}, fields, made)
