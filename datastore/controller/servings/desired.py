"""The objects that a Serving asks for: Deployment, Service and HorizontalPodAutoscaler. Pure: mappings in and out.

The pods mount the claim of the Datastore that holds the model, read-only. The init container sees the model's directory
and verifies the version; the serving container sees only the version, at spec.path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from datastore.api.model import SERVING as KIND
from datastore.api.model import ServingSpec
from datastore.api.names import APPLIED, MANAGED_BY, MODEL, MODEL_VERSION, SERVING
from datastore.api.objects import CONFINED, owner_reference
from datastore.controller.runtime.comparing import digest
from datastore.controller.runtime.ownimage import Image

Raw = Mapping[str, Any]
JSON = dict[str, Any]

MANAGER = "datastore-servings"
VERIFY, SERVE, VOLUME = "verify", "serve", "store"
STORE = "/store"
SETTLE_S = 15
"""How long a deleted pod still answers; a busy node takes seconds until it sends no more connections to the pod."""
GRACE_S = SETTLE_S + 60
"""How long a deleted pod may take to end before it is killed; this leaves time for long requests."""
_TENSORFLOW_SERVING = re.compile(r"(^|/)tensorflow/serving(:[^/]*)?(@[^/]*)?$")
_HEALTH_OF_TENSORFLOW_SERVING = "--enable_grpc_healthcheck_service=true"
_STATUS_OF_TENSORFLOW_SERVING = "/v1/models/model"


class Target(NamedTuple):
    """What is to be served: a version, and the claim of its Datastore."""

    version: int
    claim: str


def deployment(serving: Raw, spec: ServingSpec, target: Target, image: Image, present: Raw | None) -> JSON:
    """Return the Deployment. present: as it is now; an autoscaler's number of replicas is taken from it."""
    metadata, template = serving["metadata"], spec.template
    labels = {SERVING: metadata["name"]}
    pod: JSON = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "initContainers": [_verifying(spec, target, image)],
        "containers": [_serving(spec, target)],
        "volumes": [
            {"name": VOLUME, "persistentVolumeClaim": {"claimName": target.claim, "readOnly": True}},
            *(template.volumes if template else ()),
        ],
    }
    more_labels: JSON = {}
    annotations: JSON = {}
    if template is not None:
        given = template.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
        for name in ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "priorityClassName"):
            pod |= {name: given[name]} if name in given else {}
        for name in ("schedulerName", "runtimeClassName"):
            pod |= {name: given[name]} if name in given else {}
        pod |= {"securityContext": context} if (context := template.pod_context) else {}
        more_labels, annotations = dict(template.labels), dict(template.annotations)
    return _of(serving, "apps/v1", "Deployment", {
        "replicas": replicas(spec, present),
        "revisionHistoryLimit": 3,
        # A new pod must answer before an old one is deleted.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "25%"}},
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {
                "labels": {**more_labels, **labels, MODEL: spec.model, MODEL_VERSION: str(target.version)},
                **({"annotations": annotations} if annotations else {}),
            },
            "spec": pod,
        },
    })  # fmt: skip


def service(serving: Raw, spec: ServingSpec) -> JSON:
    """Return the Service, with the one port on which the image listens."""
    port = {
        "name": spec.protocol,
        "port": spec.listens,
        "targetPort": spec.listens,
        "protocol": "TCP",
        "appProtocol": "kubernetes.io/h2c" if spec.protocol == "grpc" else "http",
    }
    body = {"type": "ClusterIP", "selector": {SERVING: serving["metadata"]["name"]}, "ports": [port]}
    return _of(serving, "v1", "Service", body)


def autoscaler(serving: Raw, spec: ServingSpec) -> JSON | None:
    """Return the HorizontalPodAutoscaler; None when the number of pods is fixed."""
    wanted = spec.autoscaling
    if wanted is None:
        return None
    target = {"type": "Utilization", "averageUtilization": wanted.target_cpu_percent}
    return _of(serving, "autoscaling/v2", "HorizontalPodAutoscaler", {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": serving["metadata"]["name"]},
        "minReplicas": wanted.min_replicas,
        "maxReplicas": wanted.max_replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    })  # fmt: skip


def replicas(spec: ServingSpec, present: Raw | None) -> int:
    """Return the number of pods to ask for: with an autoscaler the number it chose, within its bounds."""
    if spec.autoscaling is None:
        return 1 if spec.replicas is None else spec.replicas
    chosen = int(present["spec"].get("replicas", 1)) if present else spec.autoscaling.min_replicas
    return min(max(chosen, spec.autoscaling.min_replicas), spec.autoscaling.max_replicas)


def endpoint(serving: Raw, spec: ServingSpec) -> str:
    """Return the Service's address, HOST:PORT, for pods of the cluster."""
    return f"{serving['metadata']['name']}.{serving['metadata']['namespace']}.svc:{spec.listens}"


def _verifying(spec: ServingSpec, target: Target, image: Image) -> JSON:
    return {
        "name": VERIFY,
        "image": image.name,
        "imagePullPolicy": image.pull_policy,
        "command": ["python3", "-m", "datastore.models.served"],
        "args": [f"--store={STORE}", f"{spec.model}:{target.version}"],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {**CONFINED, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumeMounts": [
            {"name": VOLUME, "mountPath": f"{STORE}/{spec.model}", "subPath": spec.model, "readOnly": True}
        ],
    }


def _serving(spec: ServingSpec, target: Target) -> JSON:
    args, health_path = spec.args, spec.health_path
    if _TENSORFLOW_SERVING.search(spec.image):
        # By default TensorFlow Serving answers no gRPC health check, and "/" with 404.
        if spec.protocol == "grpc" and args is None and spec.command is None:
            args = [_HEALTH_OF_TENSORFLOW_SERVING]
        if health_path == "/":
            health_path = _STATUS_OF_TENSORFLOW_SERVING
    asked: JSON = {"grpc": {"port": spec.listens, "service": spec.health_service}}
    if spec.protocol == "http":
        asked = {"httpGet": {"path": health_path, "port": spec.listens}}
    given = {
        "DATASTORE_MODEL": spec.model,
        "DATASTORE_MODEL_VERSION": str(target.version),
        "DATASTORE_MODEL_PATH": spec.path,
        "DATASTORE_PORT": str(spec.listens),
    }
    own = [each.model_dump(by_alias=True, exclude_none=True) for each in spec.env]
    named = {each.name for each in spec.env}
    template = spec.template
    return {
        "name": SERVE,
        "image": spec.image,
        **({"imagePullPolicy": template.image_pull_policy} if template and template.image_pull_policy else {}),
        **({"command": list(spec.command)} if spec.command is not None else {}),
        **({"args": list(args)} if args is not None else {}),
        "env": [*({"name": name, "value": value} for name, value in given.items() if name not in named), *own],
        "ports": [{"name": spec.protocol, "containerPort": spec.listens, "protocol": "TCP"}],
        # Answers from a busy node may be seconds late; that is no reason to take all pods out of service at once.
        "readinessProbe": {**asked, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 3},
        # The kubelet's own sleep works for every image, also for one without a shell.
        "lifecycle": {"preStop": {"sleep": {"seconds": SETTLE_S}}},
        **({"resources": spec.resources.model_dump(by_alias=True, exclude_defaults=True)} if spec.resources else {}),
        "securityContext": {**(template.container_context if template else {}), "allowPrivilegeEscalation": False},
        "volumeMounts": [
            {
                "name": VOLUME,
                "mountPath": spec.path,
                "subPath": f"{spec.model}/{target.version}",
                "readOnly": True,
            },
            *(template.volume_mounts if template else ()),
        ],
    }


def _of(serving: Raw, api_version: str, kind: str, spec: JSON) -> JSON:
    metadata = serving["metadata"]
    # The digest leaves out the number of pods, which an autoscaler may choose.
    asked = {name: value for name, value in spec.items() if name != "replicas"}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {MANAGED_BY: MANAGER, SERVING: metadata["name"]},
            "annotations": {APPLIED: digest(asked)},
            "ownerReferences": [owner_reference(KIND, metadata["name"], metadata["uid"])],
        },
        "spec": spec,
    }
