"""The reason, in the conditions of a Datastore, of each error that keeps it from being Ready."""

from __future__ import annotations

from datastore import errors
from datastore.errors import DatastoreError

REASONS: dict[type[DatastoreError], str] = {
    errors.BucketNotFound: "BucketNotFound",
    errors.CredentialsInvalid: "CredentialsInvalid",
    errors.AccessDenied: "AccessDenied",
    errors.HostUntrusted: "HostUntrusted",
    errors.EndpointNotAllowed: "EndpointNotAllowed",
    errors.WrongRegion: "WrongRegion",
    errors.ClockSkew: "ClockSkew",
    errors.Unreachable: "EndpointUnreachable",
    errors.DeadlineExceeded: "EndpointUnreachable",
    errors.Throttled: "Throttled",
    errors.ServerFault: "ServerFault",
    errors.ServerStarting: "ServerStarting",
    errors.CorruptBody: "ServerFault",
    errors.OutOfSpace: "OutOfSpace",
    errors.InvalidManifest: "InvalidSpec",
    errors.StoreError: "StorageRefused",
    errors.DatastoreError: "Failed",
}
"""The reason of each class of error. An error has the reason of its most special class that stands here."""
