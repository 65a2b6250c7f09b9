"""What kopf watches for a controller: it lists, watches, lists again when a watch breaks, and logs in for that.

kopf's handlers with retries are not used: they act on what changed, and our controllers act on what is. Each event goes
to one plain function, which takes it into an informer store and puts a key on a queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from datastore.api.resources import Resource

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A kind of object, and who is told of each event ({"type": ..., "object": ...}). Selectors: '' for all."""

    resource: Resource
    tell: Callable[[Raw], None]
    labels: str = ""
    fields: str = ""


def registry(watches: Sequence[Watch]) -> kopf.OperatorRegistry:
    """kopf's table of who is told what."""
    made = kopf.OperatorRegistry()
    for watch in watches:
        group, _, version = watch.resource.api_version.rpartition("/")
        plural = watch.resource.plural
        kopf.on.event(group, version, plural, registry=made, id=plural)(_handler(watch.tell))
    kopf.on.login(registry=made)(_login)
    return made


def operator_settings(watches: Sequence[Watch]) -> kopf.OperatorSettings:
    """kopf's settings."""
    made = kopf.OperatorSettings()
    # Neither CRDs nor namespaces are watched: what we serve is fixed, and the right to list them is not asked for.
    made.scanning.disabled = True
    made.posting.enabled = False
    made.watching.server_timeout = 240
    made.watching.connect_timeout = 10
    made.watching.chunk_size = 500
    made.networking.request_timeout = 30
    made.queueing.idle_timeout = 1.0
    made.peering.standalone = True
    for watch in watches:
        if watch.labels:
            made.watching.label_selectors[watch.resource.plural] = watch.labels
        if watch.fields:
            made.watching.field_selectors[watch.resource.plural] = watch.fields
    return made


def _login(**_: object) -> kopf.ConnectionInfo | None:
    """The pod's service account, else KUBECONFIG, as our own requests have it."""
    settings = kopf.OperatorSettings()
    pod = kopf.login_with_service_account(logger=log, settings=settings)
    return pod or kopf.login_with_kubeconfig(logger=log, settings=settings)


def _handler(tell: Callable[[Raw], None]) -> Any:
    async def handle(event: Raw, **_: object) -> None:
        tell(event)

    return handle
