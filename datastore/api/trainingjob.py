"""The TrainingJob, `datastore.dev/v1alpha1`: a user's image and command, on one machine or many, with Datastores as
directories. The same file runs on a laptop (`datastore job submit --local`) and in a cluster.

The CRD and docs/reference/trainingjob.md are generated from these models, as for the Datastore (datastore.py).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from datastore.api.datastore import ApiObject, ObjectMeta
from datastore.api.fields import (
    NO_WAY_UP,
    PREFIX_PATTERN,
    AbsolutePath,
    DnsName,
    Flag,
    Line,
    ModelName,
    Part,
    matches,
    text_schema,
)
from datastore.api.pod import MAX_SECONDS, Environment, Label, PodTemplate, Resources, Text, WholeSeconds, Words
from datastore.api.rules import immutable, keyed_by, rules
from datastore.api.status import Condition, Count, Status, Timestamp, conditions

KIND = "TrainingJob"
RoleName = Literal["master", "ps", "worker", "evaluator"]
ROLES: tuple[RoleName, ...] = ("master", "ps", "worker", "evaluator")
MAX_NAME = 51
"""A pod's name is NAME-ROLE-INDEX. It is also a host name, of at most 63 characters: 51 + len("-evaluator-0")."""
MAX_SCHEDULED_NAME = 40
"""Each run of a schedule is a TrainingJob named NAME-YYMMDDHHMM, which may have MAX_NAME characters."""
MAX_REPLICAS = 1000
MAX_GPUS = 8192
CONDITION_TYPES = (
    "DatastoresReady",
    "Running",
    "Suspended",
    "Succeeded",
    "Failed",
    "ResourcesFreed",
    "Saved",
    "Starved",
)
DEFAULT_BACKOFF_LIMIT = 6
DEFAULT_EVALUATOR_GRACE_S = 600
DEFAULT_START_DEADLINE_S = 600
_NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"


def _name(value: str) -> str:
    if not matches(_NAME_PATTERN, value) or len(value) > MAX_NAME:
        raise ValueError(
            f"must have at most {MAX_NAME} lower-case letters, digits and '-', for it names hosts; not {value[:64]!r}"
        )
    return value


def _sub_path(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/") or not matches(PREFIX_PATTERN, value):
        raise ValueError("must be a path below the Datastore: without '/' at its start, and without '..'")
    return value.strip("/")


def _path_of_job(value: object) -> object:
    if isinstance(value, str) and not value.startswith("/"):
        raise ValueError(f"must be an absolute path, as the job sees it, such as /data; not {value[:64]!r}")
    return value


def _schedule(value: str) -> str:
    # This checks only how many fields there are; datastore.training.schedule checks what they hold.
    if len(value.split()) != 5:
        raise ValueError("must be five fields: minute hour day month weekday, such as '0 3 * * 1'")
    return value


JobName = Annotated[str, AfterValidator(_name), text_schema(_NAME_PATTERN, maxLength=MAX_NAME)]
SubPath = Annotated[str, AfterValidator(_sub_path), text_schema(PREFIX_PATTERN, maxLength=1024, **NO_WAY_UP)]
PathOfJob = Annotated[AbsolutePath, BeforeValidator(_path_of_job)]
Schedule = Annotated[str, AfterValidator(_schedule), text_schema(maxLength=128)]


Replicas = Annotated[int, Field(ge=0, le=MAX_REPLICAS, strict=True)]
Gpus = Annotated[int, Field(ge=0, le=MAX_GPUS, strict=True)]
AllGpus = Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]
GpusPerTask = Annotated[int, Field(ge=1, le=64, strict=True)]
Times = Annotated[int, Field(ge=0, le=1000, strict=True)]
SomeSeconds = Annotated[int, Field(ge=1, le=MAX_SECONDS, strict=True)]


class Role(Part):
    """The replicas of one role; a field that is left out is as in spec."""

    replicas: Replicas | None = Field(
        None,
        description="Number of replicas. Left out: 1, or for workers with spec.gpus what gpus and gpusPerTask make. "
        "A role that is not listed has none, except for the master, which is there unless it has replicas: 0.",
    )
    image: Line | None = Field(None, description="Image of this role. Left out: spec.image.")
    command: Words | None = Field(None, description="Command of this role. Left out: spec.command.")
    args: Words | None = Field(None, description="Arguments of this role's command. Left out: spec.args.")
    env: Environment = Field(
        default_factory=list,
        description="More variables of the environment of this role, in place of variables of the same name in "
        "spec.env.",
    )
    resources: Resources | None = Field(
        None, description="What each replica of this role gets. Left out: spec.resources."
    )
    gpus: Gpus | None = Field(
        None,
        description="Number of GPUs of each replica. Left out: none, or for master and workers with spec.gpus their "
        "share of those.",
    )
    template: PodTemplate | None = Field(
        None, description="More fields of this role's pods; each field that is set here replaces that of spec.template."
    )


class Roles(Part):
    """The roles of the processes. Without ps and worker the training runs on a single machine."""

    master: Role | None = Field(
        None,
        description="The chief, of rank 0: one replica. With replicas: 0 there is none, and worker 0 is the chief. "
        "Left out: one.",
    )
    ps: Role | None = Field(None, description="Parameter servers. Left out: none.")
    worker: Role | None = Field(None, description="Workers. Left out: none.")
    evaluator: Role | None = Field(
        None, description="One process that runs beside the training and evaluates its checkpoints. Left out: none."
    )


class MountedDatastore(Part):
    """A Datastore, and the directory at which the processes see it."""

    name: DnsName = Field(description="Name of the Datastore, in the same namespace.")
    path: PathOfJob = Field(
        description="Absolute path at which the processes see the Datastore; two Datastores can't have the same."
    )
    read_only: Flag = Field(False, description="Refuse every change below this path.")
    sub_path: SubPath = Field(
        "",
        description="Show only this directory of the Datastore. If it is missing, it is made; with readOnly that is "
        "an error, in a cluster unless the job names the Datastore without readOnly, too.",
    )


class PlaceInDatastore(Part):
    """A directory of one of the job's Datastores."""

    datastore: DnsName = Field(description="Name of one of spec.datastores.")
    path: SubPath = Field("", description="Path of the directory in the Datastore. Left out: the whole Datastore.")


class TensorBoard(PlaceInDatastore):
    """The directory of the event files, and the image that shows them."""

    image: Line | None = Field(
        None,
        description="Image that has TensorBoard, for a cluster. Left out: the image of the master, or of worker 0 if "
        "there is no master; TensorFlow's images have TensorBoard.",
    )


class Save(Part):
    """The directory that becomes a version of a model when the job has succeeded."""

    model: ModelName = Field(description="Name of the Model.")
    source: PathOfJob = Field(
        alias="from",
        description="Path of the directory as the processes see it. It must be in one of spec.datastores that is not "
        "readOnly.",
    )


_WHAT_RUNS = "it says what runs; make another TrainingJob, or delete this one first"
_FIXED = (
    "framework",
    "image",
    "command",
    "args",
    "workingDir",
    "datastores",
    "gpus",
    "gpusPerTask",
    "success",
    "restart",
)


_NO_FRAMEWORK = (
    "framework is missing: with several processes it says what they are told about each other, and none where that is "
    "nothing"
)


def _count_rule(role: str, left_out: int) -> str:
    """Return a CEL expression for a role's number of replicas. left_out: the number when the role is not named."""
    place = f"self.roles.{role}"
    return f"(!has({place}) ? {left_out} : !has({place}.replicas) ? 1 : {place}.replicas)"


def _spec_rules() -> list[dict[str, str]]:
    processes = [_count_rule("master", 1), *(_count_rule(role, 0) for role in ("ps", "evaluator"))]
    workers = f"(has(self.gpus) ? 0 : {_count_rule('worker', 0)})"
    return [
        {
            "rule": "has(self.framework) || "
            "((!has(self.gpus) || !has(self.gpusPerTask) || self.gpus <= self.gpusPerTask) && "
            f"(!has(self.roles) || {' + '.join(processes)} + {workers} <= 1))",
            "message": _NO_FRAMEWORK,
        },
        {
            "rule": "has(self.gpus) == has(self.gpusPerTask)",
            "message": "gpus (in all) and gpusPerTask belong together",
        },
        {
            "rule": "!has(self.gpus) || !has(self.roles) || "
            "((!has(self.roles.master) || !has(self.roles.master.gpus)) && "
            "(!has(self.roles.worker) || (!has(self.roles.worker.gpus) && !has(self.roles.worker.replicas))))",
            "message": "gpus and gpusPerTask say how many workers there are and what each gets; leave out "
            "roles.worker.replicas and the gpus of master and worker",
        },
        {
            "rule": "!has(self.roles) || !has(self.roles.master) || !has(self.roles.master.replicas) || "
            "self.roles.master.replicas <= 1",
            "message": "there is one master at most",
            "fieldPath": ".roles.master.replicas",
        },
        {
            "rule": "!has(self.roles) || !has(self.roles.evaluator) || !has(self.roles.evaluator.replicas) || "
            "self.roles.evaluator.replicas <= 1",
            "message": "there is one evaluator at most",
            "fieldPath": ".roles.evaluator.replicas",
        },
        {
            "rule": "!has(self.tensorboard) || (has(self.datastores) && "
            "self.datastores.exists(each, each.name == self.tensorboard.datastore))",
            "message": "tensorboard.datastore must be one of datastores",
        },
        {
            "rule": "!has(self.logs) || (has(self.datastores) && "
            "self.datastores.exists(each, each.name == self.logs.datastore && !(has(each.readOnly) && each.readOnly)))",
            "message": "logs.datastore must be one of datastores that is not readOnly",
        },
        *immutable(optional=_FIXED, why=_WHAT_RUNS),
    ]


def _without_default(schema: dict[str, Any]) -> None:
    """Drop the default, since the rule that demands the field could not see that one is filled in by the API server."""
    del schema["default"]


class TrainingJobSpec(Part):
    """What runs, on which data, and when the job has succeeded or failed."""

    model_config = rules(*_spec_rules())

    framework: Literal["tensorflow", "pytorch", "jax", "mxnet", "mpi", "none"] = Field(
        "none",
        json_schema_extra=_without_default,
        description="Framework of the processes, which decides by which variables they find each other: tensorflow "
        "(TF_CONFIG), pytorch (MASTER_ADDR, RANK, PET_*), jax (JAX_*), mxnet (DMLC_*), mpi (a host file; the master "
        "runs mpirun), none (no such variables). Needed for several processes. Left out, with one process: none.",
    )
    image: Line | None = Field(
        None,
        description="Container image. Needed in a cluster and with --container; without it a laptop runs its own "
        "programs.",
    )
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="The command, which is not run in a shell; $(NAME) stands for the value of a variable of env, $$ "
        "for $. Left out: the image's own command, where the image is run.",
    )
    args: Words | None = Field(None, description="Arguments of the command, after its own words.")
    env: Environment = Field(
        default_factory=list, description="Variables of the environment, besides those of the image and the framework."
    )
    working_dir: PathOfJob | None = Field(
        None,
        description="Directory in which the command starts. Left out: the image's, or on a laptop without containers "
        "the directory from which the job is submitted. That directory is also shown at this path if the laptop has "
        "no such path.",
    )
    roles: Roles = Field(
        default_factory=lambda: Roles.model_validate({}),
        description="Roles of the processes, and how many replicas each role has. Left out: one master, that is "
        "training on a single machine.",
    )
    resources: Resources | None = Field(
        None, description="CPU, memory and other resources of each replica, as in a container, but without GPUs."
    )
    gpus: AllGpus | None = Field(
        None,
        description="Number of GPUs of master and workers together. They are split into tasks of gpusPerTask: 100 "
        "GPUs with gpusPerTask 8 make 13 tasks, 12 with 8 GPUs and one with 4, which is the master. Left out: each "
        "role says what its replicas have.",
    )
    gpus_per_task: GpusPerTask | None = Field(
        None, description="The most GPUs of one task: as many as a machine has. Needed with gpus."
    )
    gpu_resource: Label = Field("nvidia.com/gpu", description="Name of the resource by which the cluster counts GPUs.")
    template: PodTemplate | None = Field(
        None, description="More fields of the pods of all roles, as in Kubernetes. A laptop ignores them."
    )
    datastores: Annotated[list[MountedDatastore], Field(max_length=32)] = Field(
        default_factory=list,
        description="Datastores, and the directories at which the processes see them. The job waits until all are "
        "Ready (condition DatastoresReady).",
        json_schema_extra=keyed_by("path"),
    )
    success: Literal["chief", "allWorkers"] | None = Field(
        None,
        description="When the training has succeeded. chief: when the chief (the master, else worker 0) has ended "
        "with exit code 0. allWorkers: when the master and all workers have. The job then waits for the evaluator, "
        "if there is one. Left out: chief for tensorflow and mpi, else allWorkers.",
    )
    restart: Literal["replica", "all"] | None = Field(
        None,
        description="What is restarted when a replica ends with an exit code of 128 or above, or its node is "
        "lost. replica: only that replica, as suits parameter servers. all: all replicas, as collective operations "
        "need it. Left out: replica for none and for tensorflow with ps, else all. An exit code from 1 to 127 fails "
        "the job. So a program that is to be started again ends with 128 or above: a TensorFlow chief that has lost a "
        "parameter server, for example.",
    )
    backoff_limit: Times = Field(
        DEFAULT_BACKOFF_LIMIT, description="The most restarts; one more failure fails the job."
    )
    active_deadline_seconds: SomeSeconds | None = Field(
        None,
        description="The most seconds that the job may run; then it fails. After a suspension the count restarts. "
        "Left out: no limit.",
    )
    evaluator_grace_seconds: WholeSeconds = Field(
        DEFAULT_EVALUATOR_GRACE_S,
        description="The most seconds that the evaluator may continue after the training has succeeded; then the "
        "evaluator is ended, and the job has succeeded.",
    )
    ttl_seconds_after_finished: WholeSeconds | None = Field(
        None, description="Seconds after its end until a finished job is deleted, with its logs. Left out: never."
    )
    suspend: Flag = Field(
        False, description="Run nothing. A running job is stopped; it is restarted when this is false."
    )
    schedule: Schedule | None = Field(
        None,
        description="Times at which the job runs, as in cron (minute hour day month weekday), e.g. '0 3 * * 1'. Each "
        "run is a separate TrainingJob, named after its time. One run at a time: a time that comes during a run is "
        "skipped. Left out: the job runs once, at once.",
    )
    time_zone: Label = Field("UTC", description="Time zone of schedule, e.g. Europe/Berlin.")
    gang: Flag = Field(
        False,
        description="Start all processes together or none. A job that can't start within startDeadlineSeconds gives "
        "back the resources that it has got so far (condition Starved), and is tried again.",
    )
    start_deadline_seconds: SomeSeconds = Field(
        DEFAULT_START_DEADLINE_S,
        description="With gang: the most seconds that one try to start all processes may take.",
    )
    tensorboard: TensorBoard | None = Field(
        None, description="Directory with event files, for which a TensorBoard runs as long as the job does."
    )
    logs: PlaceInDatastore | None = Field(
        None, description="Directory in which the whole log of each replica is kept, as NAME/ROLE-INDEX.log."
    )
    save: Save | None = Field(
        None, description="Directory that is saved as a new version of a Model when the job has succeeded."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for check in (self._gpus, self._one_of_each, self._places, self._processes):
            check()
        return self

    def _gpus(self) -> None:
        if (self.gpus is None) != (self.gpus_per_task is None):
            raise ValueError("must have both or neither of gpus (in all) and gpusPerTask")
        master, worker = self.roles.master, self.roles.worker
        said = (master and master.gpus is not None) or (
            worker and (worker.gpus is not None or worker.replicas is not None)
        )
        if self.gpus is not None and said:
            raise ValueError(
                "has gpus and gpusPerTask, which say how many workers there are and what each gets: leave out "
                "roles.worker.replicas and the gpus of master and worker"
            )
        if self.gpus is not None and self.gpus_per_task and math.ceil(self.gpus / self.gpus_per_task) > MAX_REPLICAS:
            raise ValueError(f"splits gpus into more than {MAX_REPLICAS} tasks: raise gpusPerTask")

    def _one_of_each(self) -> None:
        for name in ("master", "evaluator"):
            role: Role | None = getattr(self.roles, name)
            if role and (role.replicas or 0) > 1:
                raise ValueError(f"has roles.{name}.replicas {role.replicas}: there is one {name} at most")

    def _places(self) -> None:
        seen: dict[str, str] = {}
        for each in self.datastores:
            path = "/" + each.path.strip("/")
            if path == "/":
                raise ValueError(f"mounts Datastore {each.name} at /; choose a directory below it")
            if path in seen:
                raise ValueError(f"mounts two Datastores at {path}: {seen[path]} and {each.name}")
            seen[path] = each.name
        names = [each.name for each in self.datastores]
        writable = [each.name for each in self.datastores if not each.read_only]
        for field, place, among in (("tensorboard", self.tensorboard, names), ("logs", self.logs, writable)):
            if place and place.datastore not in among:
                what = "spec.datastores" + (" that are not readOnly" if place.datastore in names else "")
                raise ValueError(f"has {field}.datastore {place.datastore}, which is not one of {what}")

    def _processes(self) -> None:
        several = sum(replicas_of(self, name) for name in ROLES) > 1
        if several and "framework" not in self.model_fields_set:
            raise ValueError(_NO_FRAMEWORK.replace("framework is missing:", "has no framework:", 1))
        if self.roles.master and self.roles.master.replicas == 0 and not replicas_of(self, "worker"):
            raise ValueError("has neither a master nor a worker: nothing would run")
        needed = [name for name in ROLES if replicas_of(self, name) and not self.command and not self.image]
        without = [name for name in needed if not (role_of(self, name).command or role_of(self, name).image)]
        if without:
            raise ValueError(f"has neither a command nor an image for {without[0]}")


def role_of(spec: TrainingJobSpec, name: str) -> Role:
    """Return the Role that the spec has for a role, with what it has from the job; its template is still its own."""
    own: Role = getattr(spec.roles, name) or Role.model_validate({})
    of_job = {field: getattr(spec, field) for field in ("image", "command", "args", "resources")}
    missing = {field: value for field, value in of_job.items() if getattr(own, field) is None}
    return own.model_copy(update={**missing, "env": [*spec.env, *own.env]})


def replicas_of(spec: TrainingJobSpec, name: str) -> int:
    """Return how many replicas a role has. If spec.gpus is set, gpus and gpusPerTask determine the workers."""
    role: Role | None = getattr(spec.roles, name)
    if role is not None and role.replicas is not None:
        return role.replicas
    if name == "worker" and spec.gpus is not None and spec.gpus_per_task:
        tasks = math.ceil(spec.gpus / spec.gpus_per_task)
        return tasks - replicas_of(spec, "master")
    return 1 if role is not None or name == "master" else 0


class JobMeta(ObjectMeta):
    """The part of the Kubernetes metadata that is used here; other fields are ignored."""

    name: JobName = Field(description="Name of the TrainingJob, unique in its namespace.")


class RoleStatus(Part):
    """How many replicas of a role are in which state."""

    role: RoleName = Field(description="The role.")
    replicas: Count = Field(description="Number of replicas.")
    active: Count = Field(0, description="Number of replicas that run.")
    succeeded: Count = Field(0, description="Number of replicas that ended with exit code 0.")
    failed: Count = Field(
        0, description="Number of replicas that ended with another exit code or were lost with their node."
    )


Phase = Literal["Pending", "Running", "Restarting", "Suspended", "Scheduled", "Succeeded", "Failed"]


class TrainingJobStatus(Status):
    """What the controller found; never part of a manifest."""

    phase: Phase | None = Field(None, description="A summary for people; programs read the conditions.")
    message: Text | None = Field(None, description="The reason of the phase, as text for people.")
    start_time: Timestamp | None = Field(None, description="When the first process started; a suspension clears this.")
    completion_time: Timestamp | None = Field(None, description="When the job succeeded or failed.")
    freed_seconds: float | None = Field(
        None,
        description="Seconds from the end of the training until none of its processes ran.",
        json_schema_extra={"type": "number"},
    )
    restarts: Count | None = Field(None, description="Number of restarts so far.")
    roles: list[RoleStatus] | None = Field(
        None,
        description="Numbers of replicas, by role.",
        json_schema_extra={**keyed_by("role"), "maxItems": 16},
    )
    evidence: Label | None = Field(
        None,
        description="Name of the ConfigMap with the exit codes, the times, the ends of the logs and the resource "
        "usage of the replicas.",
    )
    tensorboard: Text | None = Field(
        None, description="Address of the TensorBoard, or the command that shows it, while it runs; or why it failed."
    )
    model_version: Label | None = Field(None, description="Name of the ModelVersion that `save` made.")
    last_run: Label | None = Field(None, description="Name of the newest TrainingJob that the schedule made.")
    next_run: Timestamp | None = Field(None, description="When the schedule makes its next TrainingJob.")
    conditions: list[Condition] | None = conditions(*CONDITION_TYPES)


class TrainingJob(ApiObject):
    """A training, on one machine or many, whose processes see Datastores as directories."""

    model_config = rules(
        {
            "rule": f"self.metadata.name.size() <= {MAX_NAME} && self.metadata.name.matches('{_NAME_PATTERN}')",
            "message": f"metadata.name must have at most {MAX_NAME} lower-case letters, digits and '-', "
            "for it names hosts",
        },
        {
            "rule": f"!has(self.spec.schedule) || self.metadata.name.size() <= {MAX_SCHEDULED_NAME}",
            "message": f"with a schedule metadata.name must have at most {MAX_SCHEDULED_NAME} letters: "
            "its runs add a time",
        },
    )

    kind: Literal["TrainingJob"] = Field(description=KIND)
    metadata: JobMeta = Field(description="Name, namespace, labels and annotations.")
    spec: TrainingJobSpec = Field(description="What runs, on which data, and when the job has succeeded or failed.")

    @model_validator(mode="after")
    def _room_for_times(self) -> Self:
        if self.spec.schedule is not None and len(self.name) > MAX_SCHEDULED_NAME:
            raise ValueError(
                f"has a schedule: then metadata.name must have at most {MAX_SCHEDULED_NAME} letters, "
                "its runs add a time"
            )
        return self
