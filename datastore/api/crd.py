"""The CustomResourceDefinitions, generated from the models. `python -m datastore.api.crd` writes base/crd.yaml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from datastore import manifests
from datastore.api.datastore import GROUP, VERSION
from datastore.api.kinds import KINDS, Kind
from datastore.api.schema import Schema, structural

HEADER = "# Generated from the models of datastore/api by `python -m datastore.api.crd`; do not edit.\n"
_WIDTH = 120


def definition(kind: Kind) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind as a mapping."""
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema(kind)},
        "subresources": {"status": {}, **({"scale": scale} if kind.scales else {})},
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": where} for name, type_, where in kind.columns
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "datastore", "app.kubernetes.io/part-of": "kube-datastore"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short_name],
                "categories": ["elearn"],
            },
            "versions": [version],
        },
    }


def schema(kind: Kind) -> Schema:
    """Return the structural schema of the whole object, including its status."""
    text = {"type": "string", "maxLength": 253}
    extra = kind.model.model_config.get("json_schema_extra")
    return {
        "type": "object",
        "description": kind.model.__doc__,
        **(extra if isinstance(extra, Mapping) else {}),
        "required": ["spec"],
        "properties": {
            "apiVersion": {**text, "description": f"{GROUP}/{VERSION}"},
            "kind": {**text, "description": kind.name},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec),
            "status": structural(kind.status),
        },
    }


def text() -> str:
    """Return the YAML text of base/crd.yaml, with one document for each kind."""
    documents = [definition(kind) for kind in KINDS]
    return HEADER + yaml.safe_dump_all(documents, sort_keys=False, width=_WIDTH, allow_unicode=True)


def path() -> Path:
    """Return the path of base/crd.yaml."""
    return Path(manifests.__path__[0], "base", "crd.yaml")


if __name__ == "__main__":
    path().write_text(text())
    sys.stdout.write(f"{path()}\n")
