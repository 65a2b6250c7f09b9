"""The status of a Datastore, which only the controller writes. The CRD's schema is generated from these models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from datastore.api.fields import Part
from datastore.api.rules import keyed_by

CONDITION_TYPES = ("Ready", "Provisioned", "CredentialsValid", "Degraded")

Timestamp = Annotated[datetime, WithJsonSchema({"type": "string", "format": "date-time"})]
Text = Annotated[str, WithJsonSchema({"type": "string", "maxLength": 2048})]
Count = Annotated[int, WithJsonSchema({"type": "integer", "format": "int64", "minimum": 0}), Field(ge=0)]


def conditions(*types: str) -> Any:
    """Return the field of a status that holds its conditions."""
    return Field(
        None,
        description=f"Conditions in the form of meta/v1, of the types {', '.join(types)}.",
        json_schema_extra={**keyed_by("type"), "maxItems": 32},
    )


class Capabilities(Part):
    """The capabilities of a directory on this backend, as probed on the backend itself."""

    symlinks: bool | None = Field(None, description="Whether symbolic links are kept.")
    empty_dirs: bool | None = Field(None, description="Whether empty directories are kept.")
    rename: bool | None = Field(None, description="Whether files and directories can be renamed.")
    append: bool | None = Field(None, description="Whether files can be appended to.")
    chmod: bool | None = Field(None, description="Whether mode and owner of files are kept.")
    hardlinks: bool | None = Field(None, description="Whether files can have several names (hard links).")
    atomic_rename: bool | None = Field(None, description="Whether every client sees a rename at once.")


class Usage(Part):
    """How much is stored."""

    bytes: Count | None = Field(None, description="Bytes stored.")
    objects: Count | None = Field(None, description="Objects or files stored.")
    size: Text | None = Field(None, description="The bytes as text for people, e.g. 1.5 GiB.")
    sampled_at: Timestamp | None = Field(None, description="When bytes and objects were counted.")


class MountSettings(Part):
    """How the nodes mount it now. The PersistentVolume only has the settings of the time when it was made."""

    spec: Annotated[
        dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    ] = Field(description="The part of the present spec that a mount needs, with the StorageClass's choices filled in.")
    memory: Text | None = Field(
        None, description="Limit of a mount server's memory that the StorageClass chose, e.g. 1Gi."
    )


class Condition(Part):
    """One condition, in the form of meta/v1."""

    type: Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 316})] = Field(
        description="Type of the condition, one CamelCase word."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 1024})] = Field(
        description="The reason of the status, as one CamelCase word for programs."
    )
    message: Annotated[str, WithJsonSchema({"type": "string", "maxLength": 32768})] = Field(
        "", description="The reason as text for people, with the server's own words."
    )
    last_transition_time: Timestamp = Field(description="When the status last changed.")
    observed_generation: Count | None = Field(
        None, description="The metadata.generation for which the condition was found."
    )


class Status(Part):
    """What the status of every kind has."""

    observed_generation: Count | None = Field(None, description="The metadata.generation the controller has acted on.")


class DatastoreStatus(Status):
    """What the controller found; never part of a manifest."""

    phase: Literal["Pending", "Ready", "Failed", "Deleting"] | None = Field(
        None, description="A summary for people; programs read the conditions."
    )
    claim_name: Text | None = Field(None, description="Name of the PersistentVolumeClaim that pods mount.")
    storage_class_name: Text | None = Field(
        None,
        description="Name of the StorageClass from which the export of a Datastore with `nfs: {}` was made: the "
        "default for NFS at that time.",
    )
    provisioned_by: Text | None = Field(
        None,
        description="Where the StorageClass had the data made: the bucket, prefix and endpoint, the NFS host and its "
        "directory, or the namespace of the NFS servers. A StorageClass that names another place is refused.",
    )
    volume_name: Text | None = Field(None, description="Name of the PersistentVolume of the claim.")
    backend: Text | None = Field(None, description="Backend that has the data: s3, nfs, glusterfs, claim or local.")
    location: Text | None = Field(None, description="Where the data is, e.g. s3://bucket/prefix.")
    capabilities: Capabilities | None = Field(
        None, description="The capabilities of a directory on this backend, as tested on the backend itself."
    )
    usage: Usage | None = Field(None, description="How much is stored.")
    owned: bool | None = Field(
        None,
        description="Whether the data in the bucket, or the export, was made for this Datastore. Delete and Archive "
        "change nothing else.",
    )
    on_deletion: Text | None = Field(
        None,
        description="What would happen to the data if the Datastore were deleted now: what would be removed, and "
        "what would stay.",
    )
    mount: MountSettings | None = Field(
        None,
        description="How the nodes mount the Datastore now; the PersistentVolume only shows the settings that it was "
        "made with.",
    )
    conditions: list[Condition] | None = conditions(*CONDITION_TYPES)
