"""A small client of the API server: the few requests that the controller makes, over aiohttp with kopf's login.

Each request is counted by verb and resource, so that a test can compare them with the RBAC rules. Event loop only.
Errors: ApiError with the server's status, reason and message; Unavailable when there is no answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from datastore.api.datastore import API_VERSION
from datastore.api.names import MANAGER
from datastore.controller.metrics import API_REQUESTS

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

DEADLINE_S = 20.0
LOGIN_S = 600.0
"""Tokens of pods last an hour; the kubelet writes a new one well before."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object as the API server addresses it."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """The path of an object, or of the collection."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        space = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return (
            f"{root}{space}/{self.plural}" + (f"/{name}" if name else "") + (f"/{subresource}" if subresource else "")
        )


DATASTORES = Resource(API_VERSION, "datastores")
CLAIMS = Resource("v1", "persistentvolumeclaims")
VOLUMES = Resource("v1", "persistentvolumes", namespaced=False)
SECRETS = Resource("v1", "secrets")
PODS = Resource("v1", "pods")
EVENTS = Resource("v1", "events")
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
LEASES = Resource("coordination.k8s.io/v1", "leases")
PEERINGS = Resource("kopf.dev/v1", "clusterkopfpeerings", namespaced=False)
BY_KIND = {
    "PersistentVolumeClaim": CLAIMS,
    "PersistentVolume": VOLUMES,
    "Datastore": DATASTORES,
    "Lease": LEASES,
    "ClusterKopfPeering": PEERINGS,
}


class ApiError(Exception):
    """The API server refused. status: HTTP; reason: its CamelCase word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the API server: {message}")
        self.status = status
        self.reason = reason


class Unavailable(Exception):
    """The API server did not answer."""


def login(**_: object) -> kopf.ConnectionInfo | None:
    """The pod's service account, else KUBECONFIG; kopf's watches and our requests alike."""
    settings = kopf.OperatorSettings()
    pod = kopf.login_with_service_account(logger=log, settings=settings)
    return pod or kopf.login_with_kubeconfig(logger=log, settings=settings)


class Cluster:
    """The API server. Close it; a login is renewed every LOGIN_S and after a 401."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._server = ""
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Release connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """An object; None when it is not there."""
        try:
            return await self._send("get", resource, resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, resource: Resource, namespace: str) -> list[dict[str, Any]]:
        """All of a namespace."""
        found = await self._send("list", resource, resource.path(namespace))
        return list(found.get("items", []))

    async def create(self, resource: Resource, namespace: str, body: Raw) -> dict[str, Any]:
        """Make an object; ApiError 409 when it is there."""
        return await self._send("create", resource, resource.path(namespace), body, {"fieldManager": MANAGER})

    async def apply(self, body: Raw, subresource: str = "") -> dict[str, Any]:
        """Server-side apply: afterwards the object has these fields, and those that we dropped are gone."""
        resource, metadata = BY_KIND[body["kind"]], body["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self._send("patch", resource, path, body, query, _APPLY)

    async def unprotect(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Take all finalizers off an object of ours that is being deleted; success when it is gone."""
        body = {"metadata": {"uid": uid, "finalizers": None}}
        try:
            await self._send("patch", resource, resource.path(namespace, name), body, {}, _MERGE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        """Ask for the removal of this very object: what is left of it while finalizers hold it, None when it is gone.

        Another object of the name (409) is none of it.
        """
        try:
            body = {"preconditions": {"uid": uid}}
            left = await self._send("delete", resource, resource.path(namespace, name), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return None
        return left if left.get("kind") != "Status" and left.get("metadata", {}).get("finalizers") else None

    async def _send(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Raw | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        subresource = path.rsplit("/", 1)[1] if path.endswith("/status") else ""
        API_REQUESTS.labels(verb, resource.plural + (f"/{subresource}" if subresource else "")).inc()
        method = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}[verb]
        for attempt in (1, 2):
            session = await self._logged_in()
            try:
                async with session.request(
                    method,
                    self._server + path,
                    params=dict(query or {}),
                    data=None if body is None else json.dumps(body),
                    headers={"Content-Type": content_type},
                ) as answer:
                    if answer.status == 401 and attempt == 1:
                        self._until = 0.0
                        continue
                    text = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Unavailable(f"the API server does not answer: {type(error).__name__}") from error
            return _parsed(answer.status, text)
        raise Unavailable("the API server does not take the service account's token")

    async def _logged_in(self) -> aiohttp.ClientSession:
        if self._session is not None and time.monotonic() < self._until:
            return self._session
        async with self._lock:
            if self._session is not None and time.monotonic() < self._until:
                return self._session
            info = login()
            if info is None:
                raise Unavailable("there is neither a service account nor a kubeconfig")
            old, self._server, self._until = self._session, info.server, time.monotonic() + LOGIN_S
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=info.as_ssl_context(), limit=16),
                headers=info.as_http_headers(),
                timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
            )
            if old is not None:
                # Requests under way may still use it; they end within their deadline.
                asyncio.get_running_loop().call_later(DEADLINE_S, lambda: asyncio.ensure_future(old.close()))
            return self._session


def _parsed(status: int, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = {}
    if status >= 400:
        # The body of a refusal can quote what was sent; Secrets are only read, so none is in it.
        raise ApiError(status, str(document.get("reason", "")), str(document.get("message", f"HTTP {status}")))
    found: dict[str, Any] = document
    return found
