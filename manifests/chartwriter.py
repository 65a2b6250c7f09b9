"""Writes the Helm chart from the kustomize base: the same objects, with values where VALUES says.

`python -m datastore.manifests.chartwriter` writes manifests/chart/; a test keeps both equal. Each value stands in a
template as `{{ toJson .Values.PATH }}`, in a variable as `{{ quote .Values.PATH }}`, which is YAML as well, so no
indentation depends on it. SWITCHES are objects that are there or not; with `namespaces`, bindings are of these and the
controller's own (overlays/namespaced).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
LABELS = {"app.kubernetes.io/name": "datastore", "app.kubernetes.io/part-of": "kube-datastore"}
NAMESPACE = "datastore-system"
KUBELET_DIR = "/var/lib/kubelet"
IMAGE = "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
RELEASE_NAMESPACE = "{{ .Release.Namespace }}"
HEADER = "{{- /* Written from manifests/base by python -m datastore.manifests.chartwriter; do not edit. */}}\n"
_POD = ("spec", "template", "spec")
_CONTAINER = (*_POD, "containers", 0)
_SHARED = {
    "tolerations": (*_POD, "tolerations"),
    "nodeSelector": (*_POD, "nodeSelector"),
    "priorityClassName": (*_POD, "priorityClassName"),
    "resources": (*_CONTAINER, "resources"),
}
WORKLOADS: dict[str, tuple[str, dict[str, tuple[str | int, ...]]]] = {
    "datastore-controller": (
        "controller",
        {**_SHARED, "replicas": ("spec", "replicas"), "args": (*_CONTAINER, "args")},
    ),
    "datastore-training-controller": (
        "trainingController",
        {**_SHARED, "replicas": ("spec", "replicas"), "args": (*_CONTAINER, "args")},
    ),
    "datastore-node": (
        "node",
        {
            **_SHARED,
            "mountMemory": (*_CONTAINER, "env", 3, "value"),
            "maxVolumes": (*_CONTAINER, "env", 4, "value"),
            "cacheSizeVolume": (*_CONTAINER, "env", 5, "value"),
            "cacheSizeNode": (*_CONTAINER, "env", 6, "value"),
        },
    ),
    "datastore-servings": (
        "servings",
        {**_SHARED, "replicas": ("spec", "replicas"), "args": (*_CONTAINER, "args")},
    ),
    "datastore-mount-daemon": ("mountDaemon", _SHARED),
    "datastore-models": ("models", {**_SHARED, "replicas": ("spec", "replicas")}),
}
"""Workload -> its part of values.yaml, and where each value stands in it."""
SWITCHES = {"rotation.yaml": "rotation.enabled", "user-rbac.yaml": "userRoles.enabled"}
"""File of the base -> the value that says whether its objects are there."""
CLAIM_PROBE = "claimProbe.enabled"
MODELS = "models.enabled"
COMPONENT = ("models.yaml", "servings.yaml")
"""What MODELS brings, in manifests/models."""
MANAGED_NFS = "managedNfs.enabled"
ENVIRONMENT = {
    "WATCH_SECRETS": "{{ .Values.rotation.enabled }}",
    "PROBE_CLAIMS": "{{ .Values.claimProbe.enabled }}",
    "SAVE_MODELS": "{{ .Values.models.enabled }}",
    "NAMESPACES": '{{ join "," .Values.namespaces }}',
    "ALLOW_ENDPOINTS": '{{ join "," .Values.endpoints }}',
    "ALLOW_RANGES": '{{ join "," .Values.allowRanges }}',
    "DENY_RANGES": '{{ join "," .Values.denyRanges }}',
}
"""Variable of controller and node plugin -> what it is in the chart."""
SERVED = {
    "datastore-controller": "datastore-controller-served",
    "datastore-training-controller": "datastore-training-controller-served",
    "datastore-models": "datastore-models-served",
    "datastore-servings": "datastore-servings-served",
    "datastore-controller-rotation": None,
}
"""ClusterRole that holds in the served namespaces only -> name of its RoleBindings, if not its own."""
OF_PARTS = {
    "datastore-models": MODELS,
    "datastore-servings": MODELS,
    "datastore-controller-rotation": SWITCHES["rotation.yaml"],
}
"""ClusterRole of a part that may be left out -> the value that says whether it is there."""
ABOUT = {
    "image": "No registry has this image: `make image` builds it.",
    "pullSecrets": "Secrets of a private registry, as in a pod: [{name: NAME}].",
    "kubeletDir": "In microk8s: /var/snap/microk8s/common/var/lib/kubelet, in k0s: /var/lib/k0s/kubelet.",
    "namespaces": "The namespaces that the controllers serve, besides their own. Empty: all.",
    "endpoints": "Servers that users may name: https://*.example.org, nfs://nas.example.org. None for S3: any for S3.",
    "allowRanges": "The private addresses that these servers may have, such as 10.20.0.0/16. Empty: none.",
    "denyRanges": "Addresses in allowRanges that these servers may not have: those of pods, services and nodes.",
    "rotation": "A changed Secret reaches mounts at once, not after 60 to 90 s. Needs Kubernetes 1.30.",
    "userRoles": "The cluster's roles edit and admin also cover our objects, and view may read them.",
    "claimProbe": "The controller creates pods that probe other drivers' volumes, if a Datastore has spec.claim.probe.",
    "models": "The controllers of Models and of Servings; the settings here are those of the first.",
    "managedNfs": "NFS servers in the cluster, for StorageClasses with `provisioner: ganesha`.",
    "podMonitor": "A PodMonitor and a PrometheusRule with alerts, for the Prometheus operator.",
    "servings": "The controller of Servings, if models.enabled.",
    "controller": "The controller of Datastores. More arguments: --allow-local=DIR, --ambient-credentials.",
    "trainingController": "The controller of TrainingJobs. More arguments: --allow-overlay=NAME (docs/SECURITY.md).",
    "node": "The node plugin: a pod on each node.",
    "mountMemory": "The most memory of the server of one mount.",
    "maxVolumes": "The most volumes of a node at a time.",
    "cacheSizeVolume": "The most disk space of the cache of one volume.",
    "cacheSizeNode": "The most disk space of the caches of all volumes of a node.",
    "mountDaemon": "The mount daemon: a pod on each node, in which the mounts run. Its memory: docs/OPERATIONS.md.",
}
"""Value -> what values.yaml says about it."""
NOT_NAMESPACED = frozenset(
    {
        "Namespace",
        "CustomResourceDefinition",
        "ClusterRole",
        "ClusterRoleBinding",
        "CSIDriver",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
)
_QUOTED = re.compile(r"'(\{\{ (?:toJson|quote) [^}]*\}\})'")


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the base as kustomize makes it, with the name of its file."""
    listed = yaml.safe_load((HERE / "base" / "kustomization.yaml").read_text())["resources"]
    for name in listed:
        for document in yaml.safe_load_all((HERE / "base" / name).read_text()):
            yield name, _kustomized(document)


def component() -> Iterator[dict[str, Any]]:
    """Every object of the component models."""
    for name in COMPONENT:
        yield from yaml.safe_load_all((HERE / "models" / name).read_text())


def values() -> dict[str, Any]:
    """values.yaml: what the base has."""
    found: dict[str, Any] = {
        "image": {},
        "kubeletDir": KUBELET_DIR,
        "namespaces": [],
        "endpoints": [],
        "allowRanges": [],
        "denyRanges": [],
        "rotation": {"enabled": True},
        "userRoles": {"enabled": True},
        "claimProbe": {"enabled": False},
        "models": {"enabled": False},
        "managedNfs": {"enabled": False},
        "podMonitor": {"enabled": False},
    }
    for document in (*component(), *(each for _, each in objects())):
        part = WORKLOADS.get(document["metadata"]["name"])
        if part is None or "template" not in document.get("spec", {}):
            continue
        image, _, tag = _at(document, (*_CONTAINER, "image")).rpartition(":")
        found["image"] = {
            "repository": image,
            "tag": tag,
            "pullPolicy": _at(document, (*_CONTAINER, "imagePullPolicy")),
            "pullSecrets": _at(document, (*_POD, "imagePullSecrets")),
        }
        found[part[0]] = found.get(part[0], {}) | {name: _at(document, path) for name, path in part[1].items()}
    return found


def schema() -> dict[str, Any]:
    """values.schema.json, by which helm refuses a value that there is not, and a switch or list that is none."""

    def typed(value: object) -> dict[str, Any]:
        return {"type": {bool: "boolean", list: "array"}[type(value)]} if isinstance(value, bool | list) else {}

    def part(known: Mapping[str, Any]) -> dict[str, Any]:
        properties = {name: typed(value) for name, value in known.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}

    properties = {name: part(value) if isinstance(value, dict) else typed(value) for name, value in values().items()}
    # helm itself puts `global` among the values of a chart that another one includes.
    return part({}) | {"properties": {**properties, "global": {}}}


def files() -> dict[str, str]:
    """The chart, by path below manifests/chart."""
    written: dict[str, list[str]] = {}
    made = {"values.yaml": _explained(_dump(values())), "values.schema.json": json.dumps(schema(), indent=2) + "\n"}
    for name, document in objects():
        if document["kind"] == "Namespace":
            continue  # helm makes it, by --create-namespace
        if document["kind"] == "CustomResourceDefinition":
            made[f"crds/{document['metadata']['name']}.yaml"] = _dump(document)
            continue
        text = _QUOTED.sub(r"\1", _dump(_templated(document))).replace(KUBELET_DIR, "{{ .Values.kubeletDir }}")
        if document["kind"] == "ClusterRoleBinding" and document["roleRef"]["name"] in SERVED:
            text = _if("not .Values.namespaces", text)
        written.setdefault(name, []).append(text)
    for name, parts in written.items():
        text = "---\n".join(parts)
        made[f"templates/{name}"] = HEADER + (_if(f".Values.{SWITCHES[name]}", text) if name in SWITCHES else text)
    made["templates/namespaces.yaml"] = HEADER + _if(".Values.namespaces", _served())
    made["templates/claim-probe.yaml"] = HEADER + _if(f".Values.{CLAIM_PROBE}", _parts("claim-probe/policy.yaml"))
    parts = []
    for document in component():
        bound = document["kind"] == "ClusterRoleBinding" and document["roleRef"]["name"] in SERVED
        text = _QUOTED.sub(r"\1", _dump(_templated(document)))
        parts.append(_if("not .Values.namespaces", text) if bound else text)
    made["templates/models.yaml"] = HEADER + _if(f".Values.{MODELS}", "---\n".join(parts))
    nfs = _if(f".Values.{MANAGED_NFS}", _parts("managed-nfs/managed-nfs.yaml"))
    made["templates/managed-nfs.yaml"] = HEADER + nfs
    monitoring = "---\n".join(_parts(f"monitoring/{name}.yaml") for name in ("podmonitor", "alerts"))
    made["templates/monitoring.yaml"] = HEADER + _if(".Values.podMonitor.enabled", monitoring)
    return made


def _explained(text: str) -> str:
    """values.yaml with ABOUT above each value."""

    def explained(found: re.Match[str]) -> str:
        return f"{found[1]}# {ABOUT[found[2]]}\n{found[0]}" if found[2] in ABOUT else found[0]

    return re.sub(r"^( *)(\w+):", explained, text, flags=re.MULTILINE)


def _if(condition: str, text: str) -> str:
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def _parts(path: str) -> str:
    documents = yaml.safe_load_all((HERE / path).read_text())
    return "---\n".join(_QUOTED.sub(r"\1", _dump(_templated(document))) for document in documents)


def _served() -> str:
    """The RoleBindings of the controller's own namespace, and then of each that is served."""
    bound = {
        document["roleRef"]["name"]: document
        for document in (*component(), *(each for _, each in objects()))
        if document["kind"] == "ClusterRoleBinding" and document["roleRef"]["name"] in SERVED
    }

    def bindings(namespace: str, subject: str) -> str:
        texts = {}
        for role, name in SERVED.items():
            document = {**bound[role], "kind": "RoleBinding"}
            document["metadata"] = {**document["metadata"], "name": name or role, "namespace": namespace}
            document["subjects"] = [{**each, "namespace": subject} for each in document["subjects"]]
            text = "---\n" + _dump(document)
            texts[role] = _if(f"$.Values.{OF_PARTS[role]}", text) if role in OF_PARTS else text
        return "".join(texts.values())

    each = f"{{{{- range .Values.namespaces }}}}\n{bindings('{{ . }}', '{{ $.Release.Namespace }}')}{{{{- end }}}}\n"
    return bindings(RELEASE_NAMESPACE, RELEASE_NAMESPACE) + each


def rendered(text: str, chosen: Mapping[str, Any], namespace: str) -> list[dict[str, Any]]:
    """What helm makes of a template of ours: the few expressions that it may hold."""
    lines = iter(re.sub(r"\{\{- /\*.*?\*/\}\}\n", "", text).splitlines(keepends=True))
    plain = "".join(_rendered(lines, chosen, namespace, ""))
    return [each for each in yaml.safe_load_all(plain) if each]


def _rendered(lines: Iterator[str], chosen: Mapping[str, Any], namespace: str, item: str) -> Iterator[str]:
    """The lines up to the `end` of a block. item: what `.` is, in a range."""
    for line in lines:
        block = re.fullmatch(r"\{\{- (if|range|end)( not)? ?\$?(?:\.Values\.([\w.]+))? \}\}\n", line)
        if block is None:
            yield _filled(line, chosen, namespace, item)
        elif block[1] == "end":
            return
        else:
            value = _at(chosen, tuple(block[3].split(".")))
            body = list(_block(lines))
            items = value if block[1] == "range" else [item] if bool(value) != bool(block[2]) else []
            for each in items:
                yield from _rendered(iter(body), chosen, namespace, each)


def _block(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a block, without its end."""
    depth = 1
    for line in lines:
        depth += line.startswith(("{{- if", "{{- range")) - line.startswith("{{- end")
        if depth == 0:
            return
        yield line


def _filled(line: str, chosen: Mapping[str, Any], namespace: str, item: str) -> str:
    def value(found: re.Match[str]) -> str:
        at = _at(chosen, tuple(found[2].split(".")))
        if found[1] == "quote ":
            return json.dumps(str(at))
        return json.dumps(at) if found[1] or isinstance(at, bool) else str(at)

    line = re.sub(r"\{\{ (toJson |quote )?\.Values\.([\w.]+) \}\}", value, line)
    line = re.sub(
        r"\{\{ join \",\" \.Values\.([\w.]+) \}\}", lambda it: ",".join(_at(chosen, tuple(it[1].split(".")))), line
    )
    return (
        line.replace(RELEASE_NAMESPACE, namespace)
        .replace("{{ $.Release.Namespace }}", namespace)
        .replace("{{ . }}", item)
    )


def _kustomized(document: dict[str, Any]) -> dict[str, Any]:
    metadata = document["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **LABELS}
    if document["kind"] not in NOT_NAMESPACED:
        metadata["namespace"] = NAMESPACE
    return document


def _templated(document: dict[str, Any]) -> dict[str, Any]:
    # The servers of managed-nfs have a namespace of their own.
    if document["metadata"].get("namespace") == NAMESPACE:
        document["metadata"]["namespace"] = RELEASE_NAMESPACE
    for subject in document.get("subjects", []):
        subject["namespace"] = RELEASE_NAMESPACE
    if "paramRef" in document.get("spec", {}):
        document["spec"]["paramRef"]["namespace"] = RELEASE_NAMESPACE
    if "namespaceSelector" in document.get("spec", {}):
        document["spec"]["namespaceSelector"] = {"matchNames": [RELEASE_NAMESPACE]}
    part = WORKLOADS.get(document["metadata"]["name"])
    if part is None or "template" not in document.get("spec", {}):
        return document
    _put(document, (*_CONTAINER, "image"), IMAGE)
    _put(document, (*_CONTAINER, "imagePullPolicy"), "{{ toJson .Values.image.pullPolicy }}")
    _put(document, (*_POD, "imagePullSecrets"), "{{ toJson .Values.image.pullSecrets }}")
    for each in _at(document, _CONTAINER).get("env", []):
        if each["name"] in ENVIRONMENT:
            each["value"] = ENVIRONMENT[each["name"]]
    for name, path in part[1].items():
        # A variable's value is text, also if a person wrote a number.
        function = "quote" if "env" in path else "toJson"
        _put(document, path, f"{{{{ {function} .Values.{part[0]}.{name} }}}}")
    return document


def _at(document: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def _put(document: Any, path: tuple[str | int, ...], value: object) -> None:
    _at(document, path[:-1])[path[-1]] = value


def _dump(document: Any) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, width=1000))


def main() -> None:
    """Write the chart."""
    for name, text in files().items():
        (HERE / "chart" / name).write_text(text)


if __name__ == "__main__":
    main()
