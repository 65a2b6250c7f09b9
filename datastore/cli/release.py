"""`kubectl datastore release NAME`: free a Datastore whose deletion is stuck, and leave its data where it is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from datastore.api.names import FINALIZER
from datastore.cli.console import note
from datastore.cli.kubectl import Kubectl
from datastore.errors import DatastoreError

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Its namespace; left out: that of the kubectl context.")
]


def release_command(
    name: Annotated[str, typer.Argument(help="A Datastore that is being deleted.")], namespace: Namespace = ""
) -> None:
    """Free a Datastore of the cluster whose deletion is stuck. Its data stays; the controller removes its volume."""
    kubectl = Kubectl(namespace)
    found = kubectl.get("datastores.datastore.dev", name)
    if found is None:
        raise DatastoreError(f"there is no Datastore {name} in this namespace of the cluster")
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
    # With a test, so that nobody else's finalizer goes when the list has changed meanwhile.
    patch = [
        {"op": "test", "path": f"/metadata/finalizers/{place}", "value": FINALIZER},
        {"op": "remove", "path": f"/metadata/finalizers/{place}"},
    ]
    kubectl.run("patch", "datastores.datastore.dev", name, "--type=json", f"--patch={json.dumps(patch)}")
    location = (found.get("status") or {}).get("location", "its location")
    note(f"Datastore {name} is released; whatever is at {location} stays there")
