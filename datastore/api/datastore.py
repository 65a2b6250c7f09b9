"""The Datastore, `datastore.dev/v1alpha1`: one manifest for the laptop and the cluster, and all its defaults.

The CRD (api/crd.py) and docs/reference/datastore.md (api/reference.py) are generated from these models, so descriptions
and rules are only here. `x-kubernetes-validations` are the CEL rules of the API server. The models check the same of a
single object; only the API server can check a change.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from datastore.api.fields import (
    AbsolutePath,
    Bucket,
    Certificate,
    DnsName,
    Endpoint,
    Flag,
    Host,
    KnownHosts,
    Line,
    NFSOption,
    Part,
    PlainPath,
    Port,
    Prefix,
    Region,
    Seconds,
    SecretName,
    SizeBytes,
)
from datastore.api.mountspec import DEFAULT_CACHE_BYTES
from datastore.api.names import GROUP as GROUP
from datastore.api.rules import immutable, rules
from datastore.api.source import SFTPLocation
from datastore.units import format_quantity

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "Datastore"
BACKENDS = ("s3", "nfs", "sftp", "glusterfs", "claim", "local")
CLASS = "storageClassName"
DEFAULT_NAMESPACE = "default"
LEAST_UPLOAD_LIMIT_BYTES = 512 << 10
"""The lowest uploadLimit that is accepted, in bytes a second: a part of 8 MiB then takes 16 s."""
WRITABLE_TTL_S = 1.0
READ_ONLY_TTL_S = 60.0


_LEAST_UPLOAD_LIMIT = format_quantity(LEAST_UPLOAD_LIMIT_BYTES)
_OTHER_DATA = (
    "make another Datastore for other data; to correct this one, delete it and apply it again: with reclaimPolicy "
    "Retain its data stays"
)


def _immutable(*fields: str, optional: tuple[str, ...] = ()) -> list[dict[str, str]]:
    return immutable(*fields, optional=optional, why=f"it says which data this is; {_OTHER_DATA}")


class S3(Part):
    """A bucket, or a prefix of one, on AWS S3 or any server that speaks its protocol."""

    model_config = rules(*_immutable("bucket", optional=("prefix", "endpoint", "credentialsSecret")))

    bucket: Bucket = Field(description="Name of the bucket.")
    prefix: Prefix = Field(
        "",
        description="Prefix of the keys that are shown; the rest of a key is the path of its file. The prefix is "
        "taken exactly as written, except that a '/' is added at its end if there is none; it can't start with '/'. "
        "Left out: the whole bucket.",
    )
    endpoint: Endpoint = Field(
        "",
        description="URL of the server, https://HOST[:PORT], without path and credentials. Left out: AWS S3 itself.",
    )
    region: Region = Field(
        "",
        description="Region of the bucket, e.g. eu-central-1; a wrong region is an error. Left out: the region of "
        "the AWS configuration, or us-east-1 if that has none; if the server then names another region for the "
        "bucket, that region.",
    )
    force_path_style: Flag = Field(
        False,
        description="Use URLs of the form ENDPOINT/BUCKET/KEY, not BUCKET.ENDPOINT/KEY. The first form is used in "
        "any case if the endpoint's host is an address or has no dot (http://127.0.0.1, http://minio), and if the "
        "bucket's name has a dot.",
    )
    credentials_secret: SecretName | None = Field(
        None,
        description="Name of a Secret in the same namespace with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
        "and, if needed, AWS_SESSION_TOKEN (or accessKeyID, secretAccessKey and sessionToken). On a laptop the "
        "Secret is in the same file; if the file has no Secret at all, or this field is left out, the default AWS "
        "credential chain is used: environment, profile, SSO, web identity, container, instance. In a cluster a "
        "Secret is needed, unless the administrator allows the cluster's identity (--ambient-credentials).",
    )
    ca_bundle: Certificate = Field(
        "",
        description="Certificates, as PEM text, against which the server's certificate is checked, besides those of "
        "the system. Certificates are public, so they can be here. Left out: the value ca.crt (or caBundle) of "
        "the Secret that credentialsSecret names, if it has one.",
    )
    create: Flag = Field(False, description="Create the bucket if it does not exist.")


_OPTIONS_OF_CLASS = "set mountOptions with server and path; for an export that is made they stand in the StorageClass"


class NFS(Part):
    """An NFS export: `{}` makes a new one for the Datastore, `{server, path}` names an existing one."""

    model_config = rules(
        {"rule": "has(self.server) == has(self.path)", "message": "set both of server and path, or none of them"},
        {"rule": "!has(self.mountOptions) || has(self.server)", "message": _OPTIONS_OF_CLASS},
        *_immutable(optional=("server", "path")),
    )

    server: Host | None = Field(
        None,
        description="Host name or address of the NFS server. Left out, together with path: in a cluster a new export "
        "is made from the StorageClass that the administrator marked as the default for NFS; for another class, set "
        "storageClassName in place of nfs.",
    )
    path: AbsolutePath | None = Field(None, description="The exported directory, or a directory below it.")
    mount_options: Annotated[tuple[NFSOption, ...], Field(max_length=16)] | None = Field(
        None,
        description="Options for the kernel's NFS client, as in nfs(5): nconnect=4, softerr, timeo=150, retrans=3, "
        "vers=4.1 and others. Mounts that begin afterwards have them; our own engine needs none of them.",
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.server is None) != (self.path is None):
            raise ValueError("must have both of server and path, or none of them")
        if self.mount_options and self.server is None:
            raise ValueError(f"is wrong: {_OPTIONS_OF_CLASS}")
        return self


class SFTP(Part):
    """A directory on an SSH server, accessed over SFTP."""

    host: Host = Field(description="Host name or address of the SSH server.")
    path: AbsolutePath = Field(description="The directory on that host.")
    port: Port = Field(22, description="Port of the SSH server.")
    credentials_secret: SecretName | None = Field(
        None,
        description="Name of a Secret in the same namespace with the key username, and ssh-privatekey or password. "
        "On a laptop the Secret is in the same file; if the file has no Secret at all, or this field is left out, "
        "your own SSH configuration, agent and keys are used.",
    )
    known_hosts: KnownHosts | None = Field(
        None,
        description="Public keys of the server, as lines of a known_hosts file (ssh-keyscan prints them). A server "
        "with another key is refused. Left out, on a laptop only: your own known_hosts files are used.",
    )


class GlusterFS(Part):
    """A GlusterFS volume."""

    model_config = rules(*_immutable("volume", optional=("path",)))

    servers: Annotated[tuple[Host, ...], Field(min_length=1, max_length=16)] = Field(
        description="Host names or addresses of GlusterFS servers; each of them can say where the volume's bricks are."
    )
    volume: Annotated[Line, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_-]*$")] = Field(description="Name of the volume.")
    path: PlainPath = Field(
        "/",
        description="Directory of the volume that is shown. It can't have blanks, commas, brackets, quotes, "
        "backslashes or '$'.",
    )


class Claim(Part):
    """Any other storage of the cluster: an existing PersistentVolumeClaim, or a new one of a StorageClass."""

    model_config = rules(
        {
            "rule": "has(self.name) != has(self.storageClassName)",
            "message": "set exactly one of name, storageClassName",
        },
        *_immutable(optional=("name", "storageClassName")),
    )

    name: DnsName | None = Field(None, description="Name of an existing PersistentVolumeClaim in the same namespace.")
    storage_class_name: DnsName | None = Field(
        None,
        description="Name of a StorageClass, from which a new PersistentVolumeClaim is made. The claim asks for the "
        "Datastore's `capacity`, or for 1Gi if that is left out.",
    )
    probe: Flag = Field(
        False,
        description="Find out once the volume's capabilities, and how much is stored on it, with a pod that mounts it "
        "for a moment and leaves nothing behind. This works only if the administrator allows such pods "
        "(--probe-claims).",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.name is None) == (self.storage_class_name is None):
            raise ValueError("must have exactly one of name, storageClassName")
        return self


class Local(Part):
    """A directory of this machine, for development; in a cluster only where the administrator allows it."""

    model_config = rules(*_immutable("path"))

    path: AbsolutePath = Field(description="The directory.")


class Cache(Part):
    """Cache, on a local disk, of what was read from the backend."""

    size: SizeBytes = Field(
        DEFAULT_CACHE_BYTES,
        description="The most disk space that the cache uses; the least recently used data is dropped first. Data "
        "that is not uploaded yet is kept outside the cache and never dropped. In a cluster the administrator's "
        "limits for each volume and each node hold as well.",
        json_schema_extra={"default": format_quantity(DEFAULT_CACHE_BYTES)},
    )
    dir: AbsolutePath | None = Field(
        None,
        description="Directory of the cache, on a laptop only (in a cluster the administrator chooses it). Left out: "
        "$XDG_CACHE_HOME/kube-datastore/objects, which is ~/.cache/kube-datastore/objects by default.",
    )


class WriteBack(Part):
    """Uploads after close: quicker, but other clients see a file later, and a lost disk loses what was not uploaded."""

    max_delay: Seconds = Field(
        5.0,
        description="The longest time from the close of a file until its upload begins; it begins sooner when much "
        "data waits for its upload.",
        json_schema_extra={"default": "5s"},
    )


def _spec_rules() -> list[dict[str, str]]:
    kinds = [
        {
            "rule": f"has(self.{name}) == has(oldSelf.{name})",
            "message": f"the backend can't change ({name} was added or removed); {_OTHER_DATA}",
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
    laptops = {
        "rule": "!has(self.sftp)",
        "message": "sftp is for laptops only (datastore mount): no cluster serves it",
        "fieldPath": ".sftp",
    }
    a_bucket = f"has(self.s3) || has(self.{CLASS})"
    limits = [
        {
            "rule": f"!has(self.conflict) || self.conflict != 'fail' || {a_bucket}",
            "message": "conflict: fail is for s3 only",
            "fieldPath": ".conflict",
        },
        *(
            {
                "rule": f"!has(self.{name}) || {a_bucket}",
                "message": f"{name} is for s3 only",
                "fieldPath": f".{name}",
            }
            for name in ("writeBack", "uploadLimit")
        ),
        {
            "rule": "!has(self.uploadLimit) || "
            f"quantity(string(self.uploadLimit)).compareTo(quantity('{_LEAST_UPLOAD_LIMIT}')) >= 0",
            "message": f"uploadLimit must be at least {_LEAST_UPLOAD_LIMIT}; leave it out for no limit",
            "fieldPath": ".uploadLimit",
        },
    ]
    return [one, *kinds, laptops, grows, *limits]


class DatastoreSpec(Part):
    """Where the data is (one of s3, nfs, sftp, glusterfs, claim, local, storageClassName), and how it is shown."""

    model_config = rules(*_spec_rules())

    s3: S3 | None = Field(None, description="A bucket, or a prefix of one, on AWS S3 or a compatible server.")
    nfs: NFS | None = Field(
        None,
        description="An NFS export: a new one that is made for this Datastore ({}), or an existing one ({server, "
        "path}).",
    )
    sftp: SFTP | None = Field(
        None,
        description="A directory on an SSH server, accessed over SFTP. For laptops only: a cluster refuses it.",
    )
    glusterfs: GlusterFS | None = Field(None, description="A GlusterFS volume.")
    claim: Claim | None = Field(
        None,
        description="Any other storage of the cluster: an existing PersistentVolumeClaim, or a new one of a "
        "StorageClass.",
    )
    local: Local | None = Field(
        None,
        description="A directory of the machine itself, for development. In a cluster the administrator must allow "
        "the directory (--allow-local).",
    )
    storage_class_name: DnsName | None = Field(
        None,
        description="In place of a backend, in a cluster only: name of a StorageClass of the provisioner "
        "csi.datastore.dev, in which the administrator chose the backend, the server and the credentials.",
    )
    read_only: Flag = Field(False, description="Never write the data: the mount refuses every change with EROFS.")
    capacity: SizeBytes | None = Field(
        None,
        description="Size that the mount shows (statfs). A backend that has quotas also enforces it. It can be set "
        "and raised later, but not lowered. Left out: no limit.",
    )
    reclaim_policy: Literal["Retain", "Delete", "Archive"] = Field(
        "Retain",
        description="What happens to the data when the Datastore is deleted from the cluster: Retain leaves it, "
        "Delete removes it, Archive renames it. Delete and Archive only touch what was made for this Datastore; "
        "status.onDeletion says beforehand what that is. A laptop never removes data.",
    )
    cache: Cache = Field(
        default_factory=lambda: Cache.model_validate({}),
        description="Cache, on a local disk, of what was read from the backend.",
        json_schema_extra={"default": {}},
    )
    attributes: Literal["listing", "full"] | None = Field(
        None,
        description="Source of a file's mode, owner and times. listing: only listings of the bucket; no request for a "
        "single object. full: also the attributes that are stored with each object, which are read once for each "
        "version of it. Left out: listing if readOnly is true, else full.",
    )
    metadata_ttl: Seconds | None = Field(
        None,
        alias="metadataTTL",
        description="The longest time until another client's change is seen, at most 24h, e.g. 1s, 500ms, 5m; a "
        "number without a unit means seconds. Left out: 60s if readOnly is true, else 1s.",
    )

    conflict: Literal["lastWriterWins", "fail"] = Field(
        "lastWriterWins",
        description="What closing a file does when another client has written the file since it was opened. If the "
        "file was rewritten here, lastWriterWins replaces the other client's file as a whole, and with fail the "
        "close is an error (ESTALE). If it was changed in part or appended to, the close is always that error and "
        "replaces nothing. After the error, what was written here is kept on disk (datastore unsent). fail is for s3 "
        "only.",
    )
    write_back: WriteBack | None = Field(
        None,
        description="For s3 only: let close return as soon as the local disk has the file, and upload the file "
        "afterwards. This is quicker, but other clients see the file later, and a lost disk loses what was not "
        "uploaded. Left out: close returns when the backend has the file. fsync always waits for the backend.",
    )

    upload_limit: SizeBytes | None = Field(
        None,
        description="For s3 only: the most bytes a second that one mount uploads to the bucket, e.g. 10Mi; at least "
        "512Ki. Copies that the server makes are not counted. Left out: no limit.",
    )

    @field_validator("upload_limit")
    @classmethod
    def _leaves_something(cls, bytes_per_s: int | None) -> int | None:
        if bytes_per_s is not None and bytes_per_s < LEAST_UPLOAD_LIMIT_BYTES:
            raise ValueError(f"must be at least {_LEAST_UPLOAD_LIMIT}; leave it out for no limit")
        return bytes_per_s

    @model_validator(mode="after")
    def _uploads_to_a_bucket(self) -> Self:
        if self.only_for_s3 and not (self.s3 or self.storage_class_name):
            raise ValueError(f"must have {self.only_for_s3[0]} only with s3")
        return self

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
        """Name of the field that is set: 's3', 'nfs', ...; 'storageClassName' if a StorageClass has the backend."""
        return next((name for name in BACKENDS if getattr(self, name) is not None), CLASS)

    @property
    def only_for_s3(self) -> tuple[str, ...]:
        """The settings given here that only s3 mounts support, as a manifest has them."""
        given = {
            "conflict: fail": self.conflict == "fail",
            "writeBack": self.write_back is not None,
            "uploadLimit": self.upload_limit is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def credentials_secret(self) -> str | None:
        """The backend's credentialsSecret, if the backend has one."""
        named = self.s3 or self.sftp
        return named.credentials_secret if named else None


class ObjectMeta(Part):
    """The part of the Kubernetes metadata that is used here; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: DnsName = Field(description="Name of the Datastore, unique in its namespace.")
    namespace: DnsName = Field(DEFAULT_NAMESPACE, description="Namespace in the cluster.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations.")


class ApiObject(Part):
    """What every kind of object has; each kind narrows the types."""

    api_version: Literal["datastore.dev/v1alpha1"] = Field(description=API_VERSION)
    kind: str
    metadata: ObjectMeta
    spec: Part
    status: dict[str, Any] | None = Field(
        None, description="Written by the controller; what a manifest says is ignored."
    )

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace


class Datastore(ApiObject):
    """Data, wherever it is kept, as one directory."""

    kind: Literal["Datastore"] = Field(description=KIND)
    metadata: ObjectMeta = Field(description="Name, namespace, labels and annotations.")
    spec: DatastoreSpec = Field(
        description="Where the data is (exactly one of s3, nfs, sftp, glusterfs, claim, local, storageClassName), and "
        "how it is shown."
    )

    @property
    def location(self) -> str:
        """Where the data is, as a short text for people: s3://bucket/prefix, nfs://server/path, ..."""
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
    """Return where the data is, as a short text for people."""
    if spec.s3:
        return f"s3://{spec.s3.bucket}/{spec.s3.prefix}"
    if spec.nfs:
        return f"nfs://{spec.nfs.server}{spec.nfs.path}" if spec.nfs.server else "nfs: an export of its own"
    if spec.sftp:
        return str(SFTPLocation(host=spec.sftp.host, path=spec.sftp.path, port=spec.sftp.port))
    if spec.glusterfs:
        return f"glusterfs://{spec.glusterfs.servers[0]}/{spec.glusterfs.volume}{spec.glusterfs.path.rstrip('/')}"
    if spec.claim:
        return f"claim:{spec.claim.name}" if spec.claim.name else f"storageclass:{spec.claim.storage_class_name}"
    return f"local:{spec.local.path}" if spec.local else f"class:{spec.storage_class_name}"
