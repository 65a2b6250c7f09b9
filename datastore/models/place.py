"""The place of a version in a store, as a separate Datastore that mounts its files read-only. Pure."""

from __future__ import annotations

from datastore.api.datastore import Datastore, DatastoreSpec


def below_store(model: str, number: int) -> str:
    """Return the directory of a version, relative to the store's root."""
    return f"{model}/{number}"


def version_spec(spec: DatastoreSpec, model: str, number: int) -> DatastoreSpec:
    """Return the spec that mounts a version of the store with this spec, read-only and with the saved modes."""
    below = below_store(model, number)
    changes: dict[str, object] = {"read_only": True, "attributes": "full", "write_back": None}
    if spec.s3:
        changes["s3"] = spec.s3.model_copy(update={"prefix": f"{spec.s3.prefix}{below}/", "create": False})
    for name in ("nfs", "sftp", "glusterfs", "local"):
        if (backend := getattr(spec, name)) is not None:
            changes[name] = backend.model_copy(update={"path": f"{(backend.path or '').rstrip('/')}/{below}"})
    return spec.model_copy(update=changes)


def version_datastore(datastore: Datastore, model: str, number: int) -> Datastore:
    """Return the Datastore that shows a version of a store."""
    return datastore.model_copy(
        update={
            "metadata": datastore.metadata.model_copy(update={"name": f"{model}-{number}"}),
            "spec": version_spec(datastore.spec, model, number),
        }
    )
