"""Writes the Helm chart from the kustomize base: the same objects, with values where VALUES says.

`python -m datastore.manifests.chartwriter` writes manifests/chart/; a test keeps both equal. Each value stands in a
template as `{{ toJson .Values.PATH }}`, which is YAML as well, so no indentation depends on it.
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
    "datastore-node": ("node", _SHARED),
    "datastore-keeper": ("keeper", {**_SHARED, "mountMemory": (*_CONTAINER, "env", 0, "value")}),
}
"""Workload -> its part of values.yaml, and where each value stands in it."""
_QUOTED = re.compile(r"'(\{\{ toJson [^}]*\}\})'")


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the base as kustomize makes it, with the name of its file."""
    listed = yaml.safe_load((HERE / "base" / "kustomization.yaml").read_text())["resources"]
    for name in listed:
        for document in yaml.safe_load_all((HERE / "base" / name).read_text()):
            yield name, _kustomized(document)


def values() -> dict[str, Any]:
    """values.yaml: what the base has."""
    found: dict[str, Any] = {"image": {}, "podMonitor": {"enabled": False}}
    for _, document in objects():
        part = WORKLOADS.get(document["metadata"]["name"])
        if part is None or "template" not in document.get("spec", {}):
            continue
        image, _, tag = _at(document, (*_CONTAINER, "image")).rpartition(":")
        found["image"] = {
            "repository": image,
            "tag": tag,
            "pullPolicy": _at(document, (*_CONTAINER, "imagePullPolicy")),
        }
        found[part[0]] = {name: _at(document, path) for name, path in part[1].items()}
    return found


def files() -> dict[str, str]:
    """The chart, by path below manifests/chart."""
    written: dict[str, list[str]] = {}
    made = {"values.yaml": _dump(values())}
    for name, document in objects():
        if document["kind"] == "Namespace":
            continue  # helm makes it, by --create-namespace
        if document["kind"] == "CustomResourceDefinition":
            made[f"crds/{document['metadata']['name']}.yaml"] = _dump(document)
            continue
        written.setdefault(name, []).append(_QUOTED.sub(r"\1", _dump(_templated(document))))
    made |= {f"templates/{name}": HEADER + "---\n".join(parts) for name, parts in written.items()}
    monitor = _templated(yaml.safe_load((HERE / "monitoring" / "podmonitor.yaml").read_text()))
    made["templates/podmonitor.yaml"] = (
        HEADER + "{{- if .Values.podMonitor.enabled }}\n" + _dump(monitor) + "{{- end }}\n"
    )
    return made


def rendered(text: str, chosen: Mapping[str, Any], namespace: str) -> list[dict[str, Any]]:
    """What helm makes of a template of ours: the few expressions that it may hold."""

    def value(found: re.Match[str]) -> str:
        at = _at(chosen, tuple(found[2].split(".")))
        return json.dumps(at) if found[1] else str(at)

    switch = re.search(r"\{\{- if \.Values\.([\w.]+) \}\}\n", text)
    if switch is not None and not _at(chosen, tuple(switch[1].split("."))):
        return []
    plain = re.sub(r"\{\{- (?:/\*.*?\*/|if [^}]*|end )\}\}\n", "", text)
    plain = re.sub(r"\{\{ (toJson )?\.Values\.([\w.]+) \}\}", value, plain)
    return [each for each in yaml.safe_load_all(plain.replace(RELEASE_NAMESPACE, namespace)) if each]


def _kustomized(document: dict[str, Any]) -> dict[str, Any]:
    metadata = document["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **LABELS}
    if document["kind"] not in (
        "Namespace",
        "CustomResourceDefinition",
        "ClusterRole",
        "ClusterRoleBinding",
        "CSIDriver",
    ):
        metadata["namespace"] = NAMESPACE
    return document


def _templated(document: dict[str, Any]) -> dict[str, Any]:
    if "namespace" in document["metadata"]:
        document["metadata"]["namespace"] = RELEASE_NAMESPACE
    for subject in document.get("subjects", []):
        subject["namespace"] = RELEASE_NAMESPACE
    if "namespaceSelector" in document.get("spec", {}):
        document["spec"]["namespaceSelector"] = {"matchNames": [RELEASE_NAMESPACE]}
    part = WORKLOADS.get(document["metadata"]["name"])
    if part is None or "template" not in document.get("spec", {}):
        return document
    _put(document, (*_CONTAINER, "image"), IMAGE)
    _put(document, (*_CONTAINER, "imagePullPolicy"), "{{ toJson .Values.image.pullPolicy }}")
    for name, path in part[1].items():
        _put(document, path, f"{{{{ toJson .Values.{part[0]}.{name} }}}}")
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
