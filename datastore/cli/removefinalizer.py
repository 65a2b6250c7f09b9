"""`kubectl datastore remove-finalizer NAME`: free what is stuck in its deletion; its data stays where it is."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from datastore.api.names import FINALIZER, GROUP
from datastore.api.resources import DATASTORES, VERSIONS
from datastore.cli.console import note
from datastore.errors import DatastoreError
from datastore.kubeclient import KubeClient, of_context

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace of the Datastore. Default: that of kubectl's context.")
]
_KINDS = {
    "": ("Datastore", DATASTORES),
    "dst": ("Datastore", DATASTORES),
    "datastore": ("Datastore", DATASTORES),
    "mv": ("ModelVersion", VERSIONS),
    "modelversion": ("ModelVersion", VERSIONS),
}
"""The kinds that have our finalizer, by their names in kubectl."""


def remove_finalizer_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="Datastores that are being deleted, or modelversion/NAME; also as `kubectl get -o name` prints them.",
        ),
    ],
    namespace: Namespace = "",
) -> None:
    """Remove the finalizer of Datastores and ModelVersions of the cluster whose deletion is stuck.

    Their data stays where it is; the controller removes their volumes.
    """
    client = of_context(os.environ, namespace)
    for name in names:
        _remove(client, name)


def _remove(client: KubeClient, given: str) -> None:
    named, _, name = given.rpartition("/")
    kind, resource = _KINDS.get(named.lower().removesuffix(f".{GROUP}").removesuffix("s"), ("", None))
    if resource is None:
        raise typer.BadParameter(f"{given}: only Datastores and ModelVersions have our finalizer", param_hint="NAME")
    found = client.get(resource, name)
    if found is None:
        raise DatastoreError(f"there is no {kind} {name} in namespace {client.namespace}")
    metadata = found["metadata"]
    if "deletionTimestamp" not in metadata:
        raise DatastoreError(
            f"{kind} {name} is not being deleted: kubectl delete {kind.lower()} {name} --wait=false first"
        )
    finalizers = list(metadata.get("finalizers") or [])
    if FINALIZER not in finalizers:
        note(f"{kind} {name} does not wait for us; other finalizers: {', '.join(finalizers) or 'none'}")
        return
    place = finalizers.index(FINALIZER)
    # The test keeps the patch from removing another finalizer if the list has changed since it was read.
    patch = [
        {"op": "test", "path": f"/metadata/finalizers/{place}", "value": FINALIZER},
        {"op": "remove", "path": f"/metadata/finalizers/{place}"},
    ]
    client.patch(resource, name, patch)
    location = (found.get("status") or {}).get("location", "its location")
    note(f"the finalizer of {kind} {name} is removed; whatever is at {location} stays there")
