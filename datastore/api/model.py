"""Model, ModelVersion, ModelExport and Serving, `datastore.dev/v1alpha1`: trained models, kept as versions, and served.

The versions are kept in a store (docs/MODELS.md), which laptops read and write as well; these objects are the cluster's
view of the store. The CRDs and the pages of docs/reference are generated from these classes, as for the Datastore.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from datastore.api.datastore import ApiObject, ObjectMeta
from datastore.api.fields import MODEL_PATTERN, AbsolutePath, Alias, DnsName, Flag, Line, ModelName, Part, Port
from datastore.api.names import DEFAULT_STORE
from datastore.api.pod import Environment, Label, PodTemplate, Resources, Text, Words
from datastore.api.rules import Rule, immutable, keyed_by, rules
from datastore.api.status import Condition, Count, Status, Timestamp, conditions
from datastore.api.trainingjob import MAX_REPLICAS, Replicas, SubPath

MODEL, VERSION_KIND, EXPORT, SERVING = "Model", "ModelVersion", "ModelExport", "Serving"
MAX_VERSION = 999_999_999
DEFAULT_IMAGE = "docker.io/tensorflow/serving:2.19.1"
DEFAULT_PATH = "/models/model/1"
"""Where TensorFlow Serving looks for version 1 of the model "model", which it serves by default."""
DEFAULT_PORTS = {"grpc": 8500, "http": 8501}
DEFAULT_TARGET_PERCENT = 80
_WHAT_IT_IS = "it says which bytes this is; make another one for others"


Version = Annotated[int, Field(ge=1, le=MAX_VERSION, strict=True)]
SomeReplicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS, strict=True)]
Percent = Annotated[int, Field(ge=1, le=100, strict=True)]


class ModelAlias(Part):
    """An alias, and the version that it means."""

    name: Alias = Field(description="Name of the alias, such as prod.")
    version: Version = Field(description="Number of the version that the alias means.")


Aliases = Annotated[
    list[ModelAlias],
    Field(
        max_length=256,
        json_schema_extra=keyed_by("name"),
    ),
]


class ModelSpec(Part):
    """Where the versions of a model are, and which versions its aliases mean."""

    model_config = rules(*immutable(optional=("store",), why="it says where the versions are; make another Model"))

    store: DnsName | None = Field(
        None,
        description="Datastore of the same namespace that holds the versions. Left out: the one named "
        f"{DEFAULT_STORE}, which is made on first use from the StorageClass that the administrator marked for models.",
    )
    description: Text = Field("", description="What the model is, for people.")
    aliases: Aliases = Field(
        default_factory=list,
        description="Aliases that are set in the store, and the versions that they mean. They stay so: a "
        "ModelVersion does not move them, and a move by a laptop is undone. An alias that is taken off this list "
        "stays in the store as it is.",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = [each.name for each in self.aliases]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"has the alias {twice[0]} twice in aliases")
        return self


class PinnedVersion(Part):
    """A version that a Serving names by its number."""

    version: Version = Field(description="Number of the version.")
    serving: Label = Field(description="Name of the Serving.")
    uid: Label = Field(description="UID of the Serving.")


class ModelStatus(Status):
    """What is in the store; never part of a manifest."""

    store: Label | None = Field(None, description="Name of the Datastore that holds the versions.")
    location: Text | None = Field(None, description="Where the store is, as a URL.")
    latest_version: Count | None = Field(None, description="Number of the newest version.")
    versions: Count | None = Field(None, description="How many versions there are.")
    aliases: Aliases | None = Field(
        None, description="The aliases in the store, and the versions that they mean, as the last Job found them."
    )
    served: Annotated[list[PinnedVersion], Field(max_length=256)] | None = Field(
        None,
        description="Versions that Servings name by number; the store refuses to delete them.",
        json_schema_extra=keyed_by("uid"),
    )
    conditions: list[Condition] | None = conditions("Ready", "StoreUpdated")


class NamedByLabel(ObjectMeta):
    """The part of the Kubernetes metadata that is used here; other fields are ignored."""

    name: ModelName = Field(description="Name, unique in its namespace.")


_NAME_RULE: Rule = {
    "rule": f"self.metadata.name.size() <= 63 && self.metadata.name.matches('{MODEL_PATTERN}')",
    "message": "metadata.name must have at most 63 lower-case letters, digits and '-'",
}


class Model(ApiObject):
    """A trained model, kept as numbered versions of a directory."""

    model_config = rules(_NAME_RULE)

    kind: Literal["Model"] = Field(description=MODEL)
    metadata: NamedByLabel = Field(description="Name, namespace, labels and annotations.")
    spec: ModelSpec = Field(
        default_factory=lambda: ModelSpec.model_validate({}),
        description="Where the versions of a model are, and which versions its aliases mean.",
    )

    @property
    def store(self) -> str:
        """spec.store with its default applied."""
        return self.spec.store or DEFAULT_STORE


class DirectoryOfDatastore(Part):
    """A directory of a Datastore of the same namespace."""

    datastore: DnsName = Field(description="Name of the Datastore.")
    path: SubPath = Field("", description="Path of the directory in the Datastore. Left out: the whole Datastore.")


class VersionOrigin(Part):
    """The training that made a version."""

    training_job: Label = Field("", description="Name of the TrainingJob.")
    training_job_uid: Label = Field("", alias="trainingJobUID", description="UID of the TrainingJob.")
    image_digest: Label = Field("", description="Digest of the image that the training ran.")
    command: Words = Field(default_factory=list, description="Command that the training ran.")


class ModelVersionSpec(Part):
    """Either a directory that becomes a new version (from), or a version that the store has (version)."""

    model_config = rules(
        {
            "rule": "has(self.from) != has(self.version)",
            "message": "set exactly one of from (save that directory) and version (one that the store has)",
        },
        *immutable("model", optional=("from", "version", "force", "aliases", "labels"), why=_WHAT_IT_IS),
    )

    model: ModelName = Field(description="Name of the Model; if there is no such Model, it is made.")
    source: DirectoryOfDatastore | None = Field(
        None, alias="from", description="Directory that is saved as a new version, as by `datastore model save`."
    )
    version: Version | None = Field(
        None, description="Number of a version that the store has already, saved by a laptop or another cluster."
    )
    force: Flag = Field(
        False,
        description="Make a new version even if the directory has the same bytes as the newest version. Without "
        "this, that version is used.",
    )
    labels: Annotated[dict[str, Label], Field(max_length=64)] = Field(
        default_factory=dict,
        description="Labels of the version, which are written into its manifest in the store and never change.",
    )
    aliases: Annotated[list[Alias], Field(max_length=16)] = Field(
        default_factory=list,
        description="Aliases that are moved to the version once, when it is saved. Aliases that the Model lists are "
        "not moved.",
    )
    origin: VersionOrigin | None = Field(None, description="The training that made the directory.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.source is None) == (self.version is None):
            raise ValueError("must have exactly one of from (save that directory) and version (one that the store has)")
        return self


class SaveProgress(Part):
    """The progress of a save or an export."""

    phase: Label = Field(description="Phase of the work: looking, reading, copying or checking.")
    files: Count | None = Field(None, description="Number of files that are done.")
    files_total: Count | None = Field(None, description="Number of files in all.")
    bytes: Count | None = Field(None, description="Number of bytes that are done.")
    bytes_total: Count | None = Field(None, description="Number of bytes in all.")
    percent: Count | None = Field(None, description="Share of the bytes that is done, in per cent.")
    eta_seconds: Count | None = Field(
        None, description="Estimate of the seconds that are left; missing where there is none."
    )


VersionPhase = Literal["Pending", "Saving", "Ready", "Failed", "Deleting"]


class ModelVersionStatus(Status):
    """The state of a version; never part of a manifest."""

    phase: VersionPhase | None = Field(None, description="A summary for people; programs read the conditions.")
    message: Text | None = Field(None, description="The reason of the phase, as text for people.")
    progress: SaveProgress | None = Field(None, description="How far the save is, while it runs.")
    version: Count | None = Field(
        None,
        description="Number of the version; if the store had the same bytes already, of the version that has them.",
    )
    digest: Label | None = Field(None, description="Digest of the version's files: sha256:...")
    files: Count | None = Field(None, description="Number of files in the version.")
    bytes: Count | None = Field(None, description="Size of all files of the version, in bytes.")
    size: Label | None = Field(None, description="The same size as text for people, e.g. 1.5 GiB.")
    store: Label | None = Field(None, description="Name of the Datastore that holds the version.")
    location: Text | None = Field(None, description="Where the version's files are, as a URL.")
    saved: Timestamp | None = Field(None, description="When the version was saved.")
    claim: Label | None = Field(
        None, description="Name of the PersistentVolumeClaim by which pods mount the version, read-only."
    )
    conditions: list[Condition] | None = conditions("Ready", "Saved", "Failed")


class ModelVersion(ApiObject):
    """One version of a Model, and a read-only volume of its files."""

    model_config = rules(_NAME_RULE)

    kind: Literal["ModelVersion"] = Field(description=VERSION_KIND)
    metadata: NamedByLabel = Field(description="Name, namespace, labels and annotations.")
    spec: ModelVersionSpec = Field(
        description="Either a directory that becomes a new version (from), or a version that the store has (version)."
    )


class ExportTarget(Part):
    """A place in a Datastore of the same namespace where nothing is yet."""

    datastore: DnsName = Field(description="Name of the Datastore.")
    path: SubPath = Field(
        min_length=1,
        description="Path in the Datastore of the new directory or file. Nothing may be there yet.",
        json_schema_extra={"minLength": 1},
    )


class ModelExportSpec(Part):
    """Which version is exported, and where to."""

    model_config = rules(
        {"rule": "!(has(self.version) && has(self.alias))", "message": "set at most one of version and alias"},
        *immutable(
            "model", "to", "format", optional=("version", "alias"), why="an export happens once; make another one"
        ),
    )

    model: ModelName = Field(description="Name of the Model.")
    version: Version | None = Field(None, description="Number of the version that is exported.")
    alias: Alias | None = Field(
        None,
        description="Alias that means the version that is exported. Without version and alias, the newest version is "
        "exported.",
    )
    to: ExportTarget = Field(description="Place to which the version is exported.")
    format: Literal["directory", "tar", "oci"] = Field(
        "directory", description="directory: the files themselves; tar: one tar file of them; oci: an OCI image layout."
    )

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.version is not None and self.alias is not None:
            raise ValueError("must have at most one of version and alias")
        return self


ExportPhase = Literal["Pending", "Exporting", "Complete", "Failed"]


class ModelExportStatus(Status):
    """The state of an export; never part of a manifest."""

    phase: ExportPhase | None = Field(None, description="A summary for people; programs read the conditions.")
    message: Text | None = Field(None, description="The reason of the phase, as text for people.")
    progress: SaveProgress | None = Field(None, description="How far the export is, while it runs.")
    version: Count | None = Field(None, description="Number of the version that was exported.")
    digest: Label | None = Field(None, description="Digest of the version's files: sha256:...")
    files: Count | None = Field(None, description="Number of files in the version.")
    bytes: Count | None = Field(None, description="Size of all files of the version, in bytes.")
    size: Label | None = Field(None, description="The same size as text for people, e.g. 1.5 GiB.")
    location: Text | None = Field(None, description="Where the exported version is.")
    conditions: list[Condition] | None = conditions("Complete", "Failed")


class ModelExport(ApiObject):
    """A version of a Model that is exported once, to another Datastore."""

    model_config = rules(_NAME_RULE)

    kind: Literal["ModelExport"] = Field(description=EXPORT)
    metadata: NamedByLabel = Field(description="Name, namespace, labels and annotations.")
    spec: ModelExportSpec = Field(description="Which version is exported, and where to.")


class Autoscaling(Part):
    """Bounds and target of the autoscaler."""

    model_config = rules(
        {
            "rule": "self.minReplicas <= self.maxReplicas",
            "message": "minReplicas must not be above maxReplicas",
        }
    )

    min_replicas: SomeReplicas = Field(1, description="The least number of pods.")
    max_replicas: SomeReplicas = Field(description="The greatest number of pods.")
    target_cpu_percent: Percent = Field(
        DEFAULT_TARGET_PERCENT,
        alias="targetCPUPercent",
        description="Pods are added when they use more than this share of resources.requests.cpu, in per cent.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"has minReplicas {self.min_replicas} above maxReplicas {self.max_replicas}")
        return self


class ServingSpec(Part):
    """Which version is served, by how many pods of which image."""

    model_config = rules(
        {
            "rule": "has(self.version) != has(self.alias)",
            "message": "set exactly one of version and alias",
        },
        {
            "rule": "!(has(self.replicas) && has(self.autoscaling))",
            "message": "set at most one of replicas and autoscaling",
        },
        *immutable("model", why="make another Serving for another model"),
    )

    model: ModelName = Field(description="Name of the Model.")
    version: Version | None = Field(None, description="Number of the version that is served.")
    alias: Alias | None = Field(
        None,
        description="Alias that means the version that is served. When the alias is moved, the pods are replaced by "
        "a rolling update.",
    )
    replicas: Replicas | None = Field(None, description="Number of pods. Left out, and without autoscaling: 1.")
    autoscaling: Autoscaling | None = Field(
        None,
        description="Let the number of pods follow their load, in place of replicas. resources.requests.cpu must be "
        "set.",
    )
    image: Line = Field(
        DEFAULT_IMAGE, description="Image of the server: TensorFlow Serving, or any other that speaks gRPC or HTTP."
    )
    command: Words | None = Field(None, description="Command of the container. Left out: the image's own.")
    args: Words | None = Field(
        None,
        description="Arguments of the container. Left out: the image's own; for TensorFlow Serving with protocol "
        "grpc and without command, the option that switches on its health checks.",
    )
    env: Environment = Field(
        default_factory=list,
        description="Variables of the environment, besides DATASTORE_MODEL, DATASTORE_MODEL_VERSION, "
        "DATASTORE_MODEL_PATH and DATASTORE_PORT.",
    )
    protocol: Literal["grpc", "http"] = Field(
        "grpc",
        description="Protocol of the server, by which it is also found out whether a pod is ready: gRPC health "
        "checking, or an HTTP GET of healthPath.",
    )
    port: Port | None = Field(
        None,
        description=f"Port on which the image listens. Left out: {DEFAULT_PORTS['grpc']} for grpc, "
        f"{DEFAULT_PORTS['http']} for http, as TensorFlow Serving has them.",
    )
    health_path: AbsolutePath = Field(
        "/",
        description="With protocol http: path of the GET that finds out whether a pod is ready. For TensorFlow "
        "Serving / stands for /v1/models/model.",
    )
    health_service: Label = Field(
        "",
        description="With protocol grpc: name of the service whose health is asked for. Left out: the server as a "
        "whole.",
    )
    path: AbsolutePath = Field(
        DEFAULT_PATH,
        description="Directory at which the container sees the version, read-only. The default is where TensorFlow "
        "Serving looks.",
    )
    resources: Resources | None = Field(
        None, description="CPU, memory and other resources of each pod, as in a container."
    )
    template: PodTemplate | None = Field(None, description="More fields of the pods, as in Kubernetes.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.version is None) == (self.alias is None):
            raise ValueError("must have exactly one of version and alias")
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("must have at most one of replicas and autoscaling")
        return self

    @property
    def listens(self) -> int:
        """spec.port with its default applied."""
        return self.port or DEFAULT_PORTS[self.protocol]


class ServingPod(Part):
    """The version that one pod actually serves."""

    name: Label = Field(description="Name of the pod.")
    version: Count | None = Field(None, description="Number of the version that the pod has mounted.")
    digest: Label | None = Field(None, description="Digest of that version: sha256:...")
    ready: Flag = Field(False, description="Whether the pod answers.")


ServingPhase = Literal["Pending", "Rolling", "Ready", "Degraded", "Failed"]


class ServingStatus(Status):
    """The state of a Serving; never part of a manifest."""

    phase: ServingPhase | None = Field(None, description="A summary for people; programs read the conditions.")
    message: Text | None = Field(None, description="The reason of the phase, as text for people.")
    version: Count | None = Field(None, description="Number of the version that is to be served.")
    digest: Label | None = Field(None, description="Digest of that version: sha256:...")
    replicas: Count | None = Field(None, description="Number of pods.")
    ready_replicas: Count | None = Field(None, description="Number of pods that answer.")
    endpoint: Text | None = Field(
        None, description="Address of the Service for pods of the cluster: its name and port."
    )
    pods: Annotated[list[ServingPod], Field(max_length=MAX_REPLICAS)] | None = Field(
        None,
        description="The version that each pod actually serves.",
        json_schema_extra=keyed_by("name"),
    )
    conditions: list[Condition] | None = conditions("Ready", "Progressing", "Degraded")


class Serving(ApiObject):
    """A version of a Model behind one address."""

    model_config = rules(_NAME_RULE)

    kind: Literal["Serving"] = Field(description=SERVING)
    metadata: NamedByLabel = Field(description="Name, namespace, labels and annotations.")
    spec: ServingSpec = Field(description="Which version is served, by how many pods of which image.")
