"""The Datastore, `datastore.dev/v1alpha1`: one manifest for the laptop and the cluster, and all its defaults.

The CRD (api/crd.py) and docs/reference/datastore.md (api/reference.py) are generated from these models: descriptions
and rules stand here and nowhere else. `x-kubernetes-validations` are the CEL rules of the API server; whatever they
check about one object the models check as well, what they check about a change only the API server can.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from datastore.api.fields import (
    AbsolutePath,
    Bucket,
    Certificate,
    DnsName,
    Endpoint,
    Flag,
    Line,
    Part,
    Prefix,
    Region,
    Seconds,
    SecretName,
    SizeBytes,
)
from datastore.api.names import GROUP as GROUP

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "Datastore"
BACKENDS = ("s3", "nfs", "glusterfs", "claim", "local")
CLASS = "storageClassName"
DEFAULT_NAMESPACE = "default"
DEFAULT_CACHE_BYTES = 10 << 30
WRITABLE_TTL_S = 1.0
READ_ONLY_TTL_S = 60.0


def _immutable(*fields: str, optional: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """CEL: these fields say which data it is, so they never change, and the optional ones never come or go.

    Not `self.?x == oldSelf.?x`: the API server's cost estimate takes an optional for unbounded and refuses the rule.
    """
    rules = {name: f"self.{name} == oldSelf.{name}" for name in fields}
    for name in optional:
        rules[name] = f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"
    return [
        {
            "rule": rule,
            "message": f"{name} is immutable: it says which data this is; make another Datastore for other data",
            "reason": "FieldValueForbidden",
            "fieldPath": f".{name}",
        }
        for name, rule in rules.items()
    ]


def _rules(*rules: dict[str, str]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [{**rule} for rule in rules]})


class S3(Part):
    """A bucket, or a prefix of one, on AWS S3 or any server that speaks its protocol."""

    model_config = _rules(*_immutable("bucket", optional=("prefix", "endpoint")))

    bucket: Bucket = Field(description="Name of the bucket.")
    prefix: Prefix = Field(
        "",
        description="Only the keys that start with this are shown, and the rest of the key is the path. Taken exactly "
        "as written, except that a '/' is added at its end if there is none; it can't start with '/'. "
        "Empty: the whole bucket.",
    )
    endpoint: Endpoint = Field(
        "",
        description="URL of the server, https://HOST[:PORT], without path and credentials. Left out: AWS S3 itself.",
    )
    region: Region = Field(
        "",
        description="Region of the bucket, e.g. eu-central-1; a wrong one is an error. Left out: the region of the AWS "
        "configuration, else us-east-1, and if the server names another one for the bucket, that one.",
    )
    force_path_style: Flag = Field(
        False,
        description="Ask for ENDPOINT/BUCKET/KEY, not BUCKET.ENDPOINT/KEY. This is always so for endpoints without a "
        "dot or by address (http://minio, http://127.0.0.1), and for buckets with a dot in the name.",
    )
    credentials_secret: SecretName | None = Field(
        None,
        description="Name of a Secret in the same namespace with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
        "and, if any, AWS_SESSION_TOKEN (accessKeyID, secretAccessKey and sessionToken are understood too). On a "
        "laptop the Secret stands in the same file; if the file holds no Secret at all, or this field is left out, "
        "the default AWS chain is asked: environment, profile, SSO, web identity, container, instance.",
    )
    ca_bundle: Certificate = Field(
        "",
        description="Certificates, as PEM text, that the server's certificate is checked against besides the "
        "system's. Certificates are public, so they stand here and not in a Secret.",
    )
    create: Flag = Field(False, description="Create the bucket if it does not exist.")


class NFS(Part):
    """An exported directory of an NFS server."""

    model_config = _rules(*_immutable("server", "path"))

    server: Line = Field(description="Host name or address of the NFS server.")
    path: AbsolutePath = Field(description="The exported directory, or one below it.")


class GlusterFS(Part):
    """A GlusterFS volume."""

    model_config = _rules(*_immutable("endpoints", "path"))

    endpoints: Line = Field(
        description="Name of the Endpoints object, in the same namespace, of the GlusterFS servers."
    )
    path: Line = Field(description="Name of the GlusterFS volume.")


class Claim(Part):
    """Any other storage of the cluster: an existing PersistentVolumeClaim, or a new one of a StorageClass."""

    model_config = _rules(
        {
            "rule": "has(self.name) != has(self.storageClassName)",
            "message": "set exactly one of name, storageClassName",
        },
        *_immutable(optional=("name", "storageClassName")),
    )

    name: DnsName | None = Field(None, description="Name of an existing PersistentVolumeClaim in the same namespace.")
    storage_class_name: DnsName | None = Field(
        None, description="StorageClass of a new PersistentVolumeClaim, which gets the Datastore's `capacity`."
    )
    probe: Flag = Field(
        False,
        description="Find out once what the volume can do, and how much is on it, by a pod that mounts it for a moment "
        "and leaves nothing behind. Only where the administrator allows such pods (--probe-claims).",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.name is None) == (self.storage_class_name is None):
            raise ValueError("must have exactly one of name, storageClassName")
        return self


class Local(Part):
    """A directory of this machine, for development; in a cluster only where the administrator allows it."""

    model_config = _rules(*_immutable("path"))

    path: AbsolutePath = Field(description="The directory.")


class Cache(Part):
    """The cache on local disk of what was read from the backend."""

    size: SizeBytes = Field(
        DEFAULT_CACHE_BYTES,
        description="Most disk space the cache takes; the least recently used data goes first. Data that is not "
        "uploaded yet is kept beside it and never dropped.",
        json_schema_extra={"default": "10Gi"},
    )
    dir: AbsolutePath | None = Field(
        None,
        description="Directory of the cache, on a laptop only (in a cluster the administrator chooses it). Left out: "
        "$XDG_CACHE_HOME/kube-datastore/objects, that is ~/.cache/kube-datastore/objects.",
    )


class WriteBack(Part):
    """Uploads behind close: quicker, but other clients see a file later, and a lost disk loses what was not sent."""

    max_delay: Seconds = Field(
        5.0,
        description="Longest time from the close of a file until its upload begins; it is sooner when much waits.",
        json_schema_extra={"default": "5s"},
    )


def _spec_rules() -> list[dict[str, str]]:
    kinds = [
        {
            "rule": f"has(self.{name}) == has(oldSelf.{name})",
            "message": f"the backend can't change ({name} was added or removed); make another Datastore for other data",
            "reason": "FieldValueForbidden",
        }
        for name in BACKENDS
    ] + _immutable(optional=(CLASS,))
    one = {
        "rule": f"[{', '.join(f'has(self.{name})' for name in (*BACKENDS, CLASS))}].filter(set, set).size() == 1",
        "message": f"set exactly one of {', '.join((*BACKENDS, CLASS))}",
    }
    grows = {
        "rule": "!has(oldSelf.capacity) || (has(self.capacity) && "
        "quantity(string(self.capacity)).compareTo(quantity(string(oldSelf.capacity))) >= 0)",
        "message": "capacity only grows: it can be set and raised, not lowered or removed",
        "reason": "FieldValueForbidden",
        "fieldPath": ".capacity",
    }
    return [one, *kinds, grows]


class DatastoreSpec(Part):
    """Where the data is, and how it is shown. Exactly one of s3, nfs, glusterfs, claim, local, storageClassName."""

    model_config = _rules(*_spec_rules())

    s3: S3 | None = Field(None, description="A bucket, or a prefix of one, on AWS S3 or a compatible server.")
    nfs: NFS | None = Field(None, description="An exported directory of an NFS server.")
    glusterfs: GlusterFS | None = Field(None, description="A GlusterFS volume.")
    claim: Claim | None = Field(
        None, description="Any other storage of the cluster: an existing PersistentVolumeClaim, or a StorageClass."
    )
    local: Local | None = Field(None, description="A directory of the machine itself, for development.")
    storage_class_name: DnsName | None = Field(
        None,
        description="In a cluster, in place of a backend: a StorageClass of the provisioner csi.datastore.dev, in "
        "which the administrator chose server, bucket and credentials.",
    )
    read_only: Flag = Field(False, description="Never write: the mount refuses every change with EROFS.")
    capacity: SizeBytes | None = Field(
        None,
        description="Size the mount shows (statfs), and keeps where the backend has quotas. It can be set and raised "
        "later, not lowered. Left out: without limit.",
    )
    reclaim_policy: Literal["Retain", "Delete", "Archive"] = Field(
        "Retain",
        description="What becomes of the data when the Datastore is deleted from the cluster: Retain leaves it, Delete "
        "removes what was made for this Datastore, Archive renames it. A laptop never removes data.",
    )
    cache: Cache = Field(
        default_factory=lambda: Cache.model_validate({}),
        description="The cache on local disk of what was read from the backend.",
        json_schema_extra={"default": {}},
    )
    attributes: Literal["listing", "full"] | None = Field(
        None,
        description="Where mode, owner and times of a file come from: listing uses what a listing says and never asks "
        "for a single object, full also reads the attributes kept with each object, once per version. Left out: "
        "listing if readOnly, else full.",
    )
    metadata_ttl: Seconds | None = Field(
        None,
        alias="metadataTTL",
        description="Longest time until another client's change is seen, at most 24h, e.g. 1s, 500ms, 5m; a number "
        "is seconds. Left out: 60s if readOnly, else 1s.",
    )

    conflict: Literal["lastWriterWins", "fail"] = Field(
        "lastWriterWins",
        description="What a close does when another client wrote the file since it was opened: lastWriterWins replaces "
        "that whole, fail is an error (ESTALE), and what was written is kept on disk (datastore unsent).",
    )
    write_back: WriteBack | None = Field(
        None,
        description="Let close return when the local disk has the file, and upload it behind that. Left out: close "
        "returns when the backend has it. fsync always waits for the backend.",
    )

    @model_validator(mode="after")
    def _exactly_one_backend(self) -> Self:
        given = [name for name in BACKENDS if getattr(self, name) is not None]
        given += [CLASS] if self.storage_class_name is not None else []
        if len(given) != 1:
            has = f"this has {' and '.join(given)}" if given else "this has none"
            raise ValueError(f"must have exactly one of {', '.join((*BACKENDS, CLASS))}; {has}")
        return self

    @property
    def backend(self) -> str:
        """Which backend it is: 's3', 'nfs', 'glusterfs', 'claim' or 'local'; 'storageClassName' leaves it open."""
        return next((name for name in BACKENDS if getattr(self, name) is not None), CLASS)


class ObjectMeta(Part):
    """The part of the Kubernetes metadata that matters here; the rest is let through."""

    model_config = ConfigDict(extra="ignore")

    name: DnsName = Field(description="Name of the Datastore, unique in its namespace.")
    namespace: DnsName = Field(DEFAULT_NAMESPACE, description="Namespace in the cluster.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations.")


class Datastore(Part):
    """Data, wherever it is kept, as one directory."""

    api_version: Literal["datastore.dev/v1alpha1"] = Field(description="datastore.dev/v1alpha1")
    kind: Literal["Datastore"] = Field(description="Datastore")
    metadata: ObjectMeta = Field(description="Name, namespace, labels and annotations.")
    spec: DatastoreSpec = Field(
        description="Where the data is (exactly one of s3, nfs, glusterfs, claim, local, storageClassName), and how it "
        "is shown."
    )
    status: dict[str, Any] | None = Field(
        None, description="Written by the controller; what a manifest says is ignored."
    )

    @property
    def name(self) -> str:
        """Its name in its namespace."""
        return self.metadata.name

    @property
    def location(self) -> str:
        """Where the data is, as one word for people: s3://bucket/prefix, nfs://server/path, ..."""
        return location_of(self.spec)

    @property
    def attributes(self) -> Literal["listing", "full"]:
        """spec.attributes with its default applied."""
        return self.spec.attributes or ("listing" if self.spec.read_only else "full")

    @property
    def metadata_ttl_s(self) -> float:
        """spec.metadataTTL in seconds with its default applied."""
        if self.spec.metadata_ttl is not None:
            return self.spec.metadata_ttl
        return READ_ONLY_TTL_S if self.spec.read_only else WRITABLE_TTL_S


def location_of(spec: DatastoreSpec) -> str:
    """Where the data is, as one word for people."""
    if spec.s3:
        return f"s3://{spec.s3.bucket}/{spec.s3.prefix}"
    if spec.nfs:
        return f"nfs://{spec.nfs.server}{spec.nfs.path}"
    if spec.glusterfs:
        return f"glusterfs://{spec.glusterfs.endpoints}/{spec.glusterfs.path}"
    if spec.claim:
        return f"claim:{spec.claim.name}" if spec.claim.name else f"storageclass:{spec.claim.storage_class_name}"
    return f"local:{spec.local.path}" if spec.local else f"class:{spec.storage_class_name}"
