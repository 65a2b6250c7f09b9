"""Sets kopf up to watch for a controller: kopf logs in, lists, watches, and lists again when a watch breaks.

kopf's handlers with retries are not used: they act on changes, and our controllers act on the present state. Each event
goes to one plain function, which takes it into an informer store and puts a key on a queue.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import kopf

from datastore.api.resources import Resource
from datastore.tls import judged_alike

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A kind to watch. tell: gets each event ({"type": ..., "object": ...}). labels, fields: selectors, '' for all."""

    resource: Resource
    tell: Callable[[Raw], None]
    labels: str = ""
    fields: str = ""


class Login(kopf.ConnectionInfo):
    """A login whose TLS context is judged_alike()."""

    def as_ssl_context(self) -> ssl.SSLContext:
        return judged_alike(super().as_ssl_context())


def registry(watches: Sequence[Watch]) -> kopf.OperatorRegistry:
    """Return kopf's registry with a handler for each watch."""
    made = kopf.OperatorRegistry()
    for watch in watches:
        group, _, version = watch.resource.api_version.rpartition("/")
        plural = watch.resource.plural
        kopf.on.event(group, version, plural, registry=made, id=plural)(_handler(watch.tell))
    kopf.on.login(registry=made)(_login)
    return made


def operator_settings(watches: Sequence[Watch]) -> kopf.OperatorSettings:
    """Return kopf's settings."""
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
    """Log in by the pod's service account, else KUBECONFIG, like our own requests."""
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(logger=log, settings=settings)
    found = found or kopf.login_with_kubeconfig(logger=log, settings=settings)
    return None if found is None else Login(**{field.name: getattr(found, field.name) for field in fields(found)})


def _handler(tell: Callable[[Raw], None]) -> Any:
    async def handle(event: Raw, **_: object) -> None:
        tell(event)

    return handle
