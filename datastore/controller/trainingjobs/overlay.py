"""The fields of a pod template that an administrator must allow; without them users can run plain pods only. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, Literal, get_args

from datastore.api.trainingjob import ROLES, PodTemplate, TrainingJobSpec, role_of

Overlay = Literal["serviceAccountName", "hostNetwork", "hostPath", "privileged"]
OVERLAYS: tuple[Overlay, ...] = get_args(Overlay)
_HARMLESS = frozenset({"runAsUser", "runAsGroup", "runAsNonRoot", "readOnlyRootFilesystem"})


def template_of(spec: TrainingJobSpec, role: str) -> PodTemplate:
    """Return the template of a role: fields of its own replace those of spec.template."""
    common, own = spec.template, role_of(spec, role).template
    if common is None or own is None:
        return own or common or PodTemplate.model_validate({})
    return common.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def refusal(spec: TrainingJobSpec, allowed: Set[str]) -> str:
    """Say what the templates ask for that is not allowed, for people; '' when all of it is allowed."""
    for role in ROLES:
        for overlay, what in _asked(template_of(spec, role)):
            if overlay not in allowed:
                return (
                    f"the template asks for {what}, which the administrator does not allow "
                    f"(--allow-overlay {overlay} of the controller of TrainingJobs)"
                )
    return ""


def _asked(template: PodTemplate) -> Iterator[tuple[Overlay, str]]:
    if template.service_account_name:
        yield "serviceAccountName", f"serviceAccountName {template.service_account_name}"
    if template.host_network:
        yield "hostNetwork", "hostNetwork"
    for volume in template.volumes:
        if "hostPath" in volume:
            yield "hostPath", f"the hostPath of volume {volume.get('name', '')!s}"
    for field, value in (template.security_context or {}).items():
        if not _is_harmless(field, value):
            yield "privileged", f"securityContext.{field}"


def _is_harmless(field: str, value: Any) -> bool:
    """Return whether a securityContext field only takes rights away, as Pod Security's level restricted demands."""
    if field in _HARMLESS or value is None:
        return True
    if field in ("privileged", "allowPrivilegeEscalation"):
        return value is False
    if field == "capabilities":
        return isinstance(value, Mapping) and set(value) <= {"drop"}
    return field == "seccompProfile" and isinstance(value, Mapping) and value.get("type") in ("RuntimeDefault",)
