"""The fields of pods that several kinds have: variables, resources, and what a template adds, as in Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from datastore.api.fields import DnsName, Flag, Part, matches, text_schema
from datastore.units import QUANTITY_PATTERN, exact_quantity

MAX_WORDS = 256
MAX_SECONDS = (1 << 31) - 1
"""The largest int32, as in batch/v1: 68 years."""
_OF_THE_POD = frozenset({"fsGroup", "fsGroupChangePolicy"})
"""Fields of a security context that Kubernetes has in the pod's only."""
_HARMLESS = frozenset({"runAsUser", "runAsGroup", "runAsNonRoot", "readOnlyRootFilesystem", *_OF_THE_POD})
_ENV_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"


def _environment_name(value: str) -> str:
    if not matches(_ENV_PATTERN, value) or len(value) > 256:
        raise ValueError("must be the name of a variable: letters, digits and '_'")
    return value


def _amount(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("must be a quantity such as 2, 500m or 4Gi")
    if exact_quantity(value) < 0:
        raise ValueError("must not be negative")
    return str(value)


def _anything(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of fields, as in a pod")
    return value


Amount = Annotated[
    str,
    BeforeValidator(_amount),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN.replace("[+-]?", "[+]?", 1),
            "x-kubernetes-int-or-string": True,
            "maxLength": 64,
        }
    ),
]
Text = Annotated[str, text_schema(maxLength=65_536)]
Label = Annotated[str, text_schema(maxLength=253)]
EnvironmentName = Annotated[
    str, AfterValidator(_environment_name), text_schema(_ENV_PATTERN, maxLength=256, minLength=1)
]
AsInAPod = Annotated[
    dict[str, Any],
    BeforeValidator(_anything),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
WholeSeconds = Annotated[int, Field(ge=0, le=MAX_SECONDS, strict=True)]


class KeyOf(Part):
    """One value of a Secret or a ConfigMap of the same namespace."""

    name: DnsName = Field(description="Name of the Secret or ConfigMap.")
    key: Label = Field(description="Key of the value in the Secret or ConfigMap.")
    optional: Flag = Field(
        False,
        description="Leave the variable out if the Secret, the ConfigMap or the key is missing; otherwise that is an "
        "error.",
    )


class FieldOf(Part):
    """A field of the pod."""

    field_path: Label = Field(description="Path of the field, such as metadata.name.")


class EnvironmentSource(Part):
    """Source of a variable's value: exactly one of the three fields."""

    secret_key_ref: KeyOf | None = Field(
        None, description="A value of a Secret in the same namespace (on a laptop: in the same file)."
    )
    config_map_key_ref: KeyOf | None = Field(
        None, description="A value of a ConfigMap in the same namespace; only in a cluster."
    )
    field_ref: FieldOf | None = Field(None, description="A field of the pod; only in a cluster.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(each is not None for each in (self.secret_key_ref, self.config_map_key_ref, self.field_ref)) != 1:
            raise ValueError("must have exactly one of secretKeyRef, configMapKeyRef, fieldRef")
        return self


class EnvironmentVariable(Part):
    """A variable of the command's environment, as in a container."""

    name: EnvironmentName = Field(description="Name of the variable.")
    value: Text | None = Field(
        None,
        description="Value of the variable. $(OTHER) stands for the value of a variable that is listed before this "
        "one, $$(OTHER) for the text $(OTHER).",
    )
    value_from: EnvironmentSource | None = Field(
        None, description="Source of the value, in place of value: exactly one of the fields."
    )

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.value is not None and self.value_from is not None:
            raise ValueError("must not have both value and valueFrom")
        return self


Environment = Annotated[list[EnvironmentVariable], Field(max_length=256)]
Words = Annotated[list[Text], Field(max_length=MAX_WORDS)]


class Resources(Part):
    """What one replica gets, as in a container. TrainingJobs have other fields for GPUs."""

    requests: Annotated[dict[str, Amount], Field(max_length=32)] = Field(
        default_factory=dict,
        description="What is reserved for each replica, e.g. of cpu, memory and ephemeral-storage.",
    )
    limits: Annotated[dict[str, Amount], Field(max_length=32)] = Field(
        default_factory=dict,
        description="What a replica can't exceed. On a laptop cpu and memory are limited if the user may write "
        "cgroups; if not, `datastore job get` says so.",
    )


class Toleration(Part):
    """A toleration, as in a pod: the pods may run on nodes with such a taint."""

    key: Label | None = Field(None, description="Key of the taint. Left out, with operator Exists: every key.")
    operator: Literal["Exists", "Equal"] | None = Field(
        None,
        description="Equal: the taint must have the value of this toleration; Exists: its value doesn't matter. Left "
        "out: Equal.",
    )
    value: Label | None = Field(None, description="Value of the taint, for operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect of the taint. Left out: every effect."
    )
    toleration_seconds: WholeSeconds | None = Field(
        None, description="For how many seconds a taint with the effect NoExecute is tolerated. Left out: forever."
    )


class PullSecret(Part):
    """A Secret with which images are pulled."""

    name: DnsName = Field(description="Name of the Secret.")


class PodTemplate(Part):
    """More fields of the pods, as in Kubernetes. A laptop ignores them.

    serviceAccountName, hostNetwork, volumes of hostPath and fields of securityContext that give more rights are refused
    unless the administrator allows them, so that the right to create TrainingJobs is the right to run plain pods only.
    """

    labels: Annotated[dict[str, Label], Field(max_length=64)] = Field(
        default_factory=dict, description="Labels of the pods (in a TrainingJob also of its Jobs), e.g. for Kueue."
    )
    annotations: Annotated[dict[str, Text], Field(max_length=64)] = Field(
        default_factory=dict,
        description="Annotations of the pods (in a TrainingJob also of its Jobs), e.g. for Volcano.",
    )
    node_selector: Annotated[dict[str, Label], Field(max_length=64)] = Field(
        default_factory=dict, description="Labels that a node must have to run the pods."
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(
        default_factory=list, description="Taints of nodes on which the pods may run anyway, as in a pod."
    )
    affinity: AsInAPod | None = Field(None, description="Affinity, as in a pod.")
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=16)] = Field(
        default_factory=list, description="Secrets with which the image is pulled."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="When the image is pulled, as in a container. Left out: the default of Kubernetes."
    )
    priority_class_name: DnsName | None = Field(None, description="PriorityClass of the pods.")
    scheduler_name: DnsName | None = Field(
        None,
        description="Scheduler of the pods, e.g. volcano. With gang, that scheduler then starts all pods together or "
        "none.",
    )
    runtime_class_name: DnsName | None = Field(None, description="RuntimeClass of the pods, e.g. nvidia.")
    volumes: Annotated[list[AsInAPod], Field(max_length=32)] = Field(
        default_factory=list,
        description="More volumes, as in a pod. A hostPath is refused in a Serving, and in a TrainingJob unless the "
        "administrator allows it.",
    )
    volume_mounts: Annotated[list[AsInAPod], Field(max_length=32)] = Field(
        default_factory=list, description="Directories at which the container sees these volumes, as in a container."
    )
    security_context: AsInAPod | None = Field(
        None,
        description="Security context, as in a container, and fsGroup as in a pod: a user who is not root needs it to "
        "write to a bucket. Fields that give more rights are refused in a Serving, and in a TrainingJob unless the "
        "administrator allows them.",
    )
    service_account_name: DnsName | None = Field(
        None,
        description="ServiceAccount of the pods. Refused in a Serving, and in a TrainingJob unless the administrator "
        "allows it.",
    )
    host_network: Flag = Field(
        False,
        description="Use the network of the node. Refused in a Serving, and in a TrainingJob unless the "
        "administrator allows it.",
    )

    @property
    def pod_context(self) -> dict[str, Any]:
        """The fields of securityContext that are the pod's."""
        return {name: value for name, value in (self.security_context or {}).items() if name in _OF_THE_POD}

    @property
    def container_context(self) -> dict[str, Any]:
        """The fields of securityContext that are the container's."""
        return {name: value for name, value in (self.security_context or {}).items() if name not in _OF_THE_POD}

    @property
    def more_rights(self) -> list[str]:
        """The fields of securityContext that give more rights than an image has by itself."""
        return [name for name, value in (self.security_context or {}).items() if not _is_harmless(name, value)]


def _is_harmless(field: str, value: Any) -> bool:
    """Return whether a securityContext field only takes rights away, as Pod Security's level restricted demands."""
    if field in _HARMLESS or value is None:
        return True
    if field in ("privileged", "allowPrivilegeEscalation"):
        return value is False
    if field == "capabilities":
        return isinstance(value, Mapping) and set(value) <= {"drop"}
    return field == "seccompProfile" and isinstance(value, Mapping) and value.get("type") in ("RuntimeDefault",)
