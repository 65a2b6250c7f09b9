"""The fields of a pod template that an administrator must allow; without them users can run plain pods only. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Literal, get_args

from datastore.api.pod import PodTemplate
from datastore.api.trainingjob import ROLES, TrainingJobSpec, role_of

Overlay = Literal["serviceAccountName", "hostNetwork", "hostPath", "privileged"]
OVERLAYS: tuple[Overlay, ...] = get_args(Overlay)


def template_of(spec: TrainingJobSpec, role: str) -> PodTemplate:
    """Return the template of a role: its own fields replace those of spec.template."""
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
    for field in template.more_rights:
        yield "privileged", f"securityContext.{field}"
