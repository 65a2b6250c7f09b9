"""The CustomResourceDefinition, generated from the models. `python -m datastore.api.crd` writes base/crd.yaml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from datastore import manifests
from datastore.api.datastore import GROUP, KIND, VERSION, Datastore, DatastoreSpec
from datastore.api.schema import Schema, structural
from datastore.api.status import DatastoreStatus

PLURAL = "datastores"
HEADER = "# Generated from datastore/api/datastore.py by `python -m datastore.api.crd`; do not edit.\n"
_WIDTH = 120


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition as a mapping."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema()},
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "datastore", "app.kubernetes.io/part-of": "kube-datastore"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "datastore",
                "shortNames": ["dst"],
                "categories": ["elearn"],
            },
            "versions": [version],
        },
    }


def schema() -> Schema:
    """The structural schema of the whole object, status included."""
    text = {"type": "string"}
    return {
        "type": "object",
        "description": Datastore.__doc__,
        "required": ["spec"],
        "properties": {
            "apiVersion": {**text, "description": f"{GROUP}/{VERSION}"},
            "kind": {**text, "description": KIND},
            "metadata": {"type": "object"},
            "spec": structural(DatastoreSpec),
            "status": structural(DatastoreStatus),
        },
    }


def text() -> str:
    """The YAML document."""
    return HEADER + yaml.safe_dump(definition(), sort_keys=False, width=_WIDTH, allow_unicode=True)


def path() -> Path:
    """Where the document is kept."""
    return Path(manifests.__path__[0], "base", "crd.yaml")


def _columns() -> list[dict[str, Any]]:
    ready = ".status.conditions[?(@.type=='Ready')]"
    columns = [
        ("Backend", "string", ".status.backend"),
        ("Location", "string", ".status.location"),
        ("Capacity", "string", ".spec.capacity"),
        ("Used", "string", ".status.usage.size"),
        ("Ready", "string", f"{ready}.status"),
        ("Reason", "string", f"{ready}.reason"),
        ("Age", "date", ".metadata.creationTimestamp"),
    ]
    return [{"name": name, "type": kind, "jsonPath": where} for name, kind, where in columns]


if __name__ == "__main__":
    path().write_text(text())
    sys.stdout.write(f"{path()}\n")
