"""`kubectl datastore remove-finalizer NAME`: free a Datastore whose deletion is stuck; its data stays where it is."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from datastore.api.names import FINALIZER
from datastore.api.resources import DATASTORES
from datastore.cli.console import note
from datastore.errors import DatastoreError
from datastore.kubeclient import of_context

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace of the Datastore. Default: that of kubectl's context.")
]


def remove_finalizer_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a Datastore that is being deleted.")],
    namespace: Namespace = "",
) -> None:
    """Remove the finalizer of a Datastore of the cluster whose deletion is stuck.

    Its data stays where it is; the controller removes its volume.
    """
    client = of_context(os.environ, namespace)
    found = client.get(DATASTORES, name)
    if found is None:
        raise DatastoreError(f"there is no Datastore {name} in namespace {client.namespace}")
    metadata = found["metadata"]
    if "deletionTimestamp" not in metadata:
        raise DatastoreError(
            f"Datastore {name} is not being deleted: kubectl delete datastore {name} --wait=false first"
        )
    finalizers = list(metadata.get("finalizers") or [])
    if FINALIZER not in finalizers:
        note(f"Datastore {name} does not wait for us; other finalizers: {', '.join(finalizers) or 'none'}")
        return
    place = finalizers.index(FINALIZER)
    # The test keeps the patch from removing another finalizer if the list has changed since it was read.
    patch = [
        {"op": "test", "path": f"/metadata/finalizers/{place}", "value": FINALIZER},
        {"op": "remove", "path": f"/metadata/finalizers/{place}"},
    ]
    client.patch(DATASTORES, name, patch)
    location = (found.get("status") or {}).get("location", "its location")
    note(f"the finalizer of Datastore {name} is removed; whatever is at {location} stays there")
