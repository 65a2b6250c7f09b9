"""A small client of the API server: the few requests that the controller makes, over aiohttp with kopf's login.

Each request is counted by verb and resource, so that a test can compare them with the RBAC rules. Event loop only.
Errors: ApiError with the server's status, reason and message; Unavailable when there is no answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
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
CONNECTIONS = 16
LOGIN_S = 600.0
"""Tokens of pods last an hour; the kubelet writes a new one well before."""
WATCH_S = 600
"""A watch ends then and is begun anew."""
SILENCE_S = 150.0
"""A watch in which nothing comes for so long is dead: the API server sends a bookmark each minute."""
LINE_BYTES = 1 << 20
"""Half of the longest event: metadata can hold 256 KiB of annotations, and the fields of many managers."""
PAGE = 500
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
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

    async def list(self, resource: Resource, namespace: str, field_selector: str = "") -> list[dict[str, Any]]:
        """All of a namespace, page by page."""
        items: list[dict[str, Any]] = []
        query = {"limit": str(PAGE), **({"fieldSelector": field_selector} if field_selector else {})}
        while True:
            found = await self._send("list", resource, resource.path(namespace), query=query)
            items += found.get("items", [])
            following = found.get("metadata", {}).get("continue", "")
            if not following:
                return items
            query["continue"] = following

    async def watch(self, resource: Resource, namespace: str) -> AsyncGenerator[tuple[str, Raw], None]:
        """(type, metadata) of everything there is in the namespace ('' for all), then of each change, for WATCH_S.

        Only metadata crosses the wire, which is all that is wanted of a Secret. Every watch begins with what there is,
        so none has to go on where another one ended. Errors: ApiError, Unavailable.
        """
        API_REQUESTS.labels("watch", resource.plural).inc()
        query = {"watch": "1", "resourceVersion": "0", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        info = _login()
        try:
            # A session of its own: watches last, and must not take the connections of the requests.
            async with (
                _session(
                    info, aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE_S, sock_read=SILENCE_S)
                ) as session,
                session.get(
                    info.server + resource.path(namespace),
                    params=query,
                    headers={"Accept": _METADATA},
                    read_bufsize=LINE_BYTES,
                ) as answer,
            ):
                if answer.status >= 400:
                    _parsed(answer.status, await answer.read())
                async for line in answer.content:
                    yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"the watch of {resource.plural} ended: {type(error).__name__}") from error

    async def annotate(self, resource: Resource, body: Raw, annotations: Mapping[str, str]) -> None:
        """Set annotations of this very object; success when it is gone."""
        metadata = body["metadata"]
        change = {"metadata": {"uid": metadata["uid"], "annotations": dict(annotations)}}
        path = resource.path(metadata.get("namespace", ""), metadata["name"])
        try:
            await self._send("patch", resource, path, change, {"fieldManager": MANAGER}, _MERGE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

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
            info = _login()
            old, self._server, self._until = self._session, info.server, time.monotonic() + LOGIN_S
            self._session = _session(info, aiohttp.ClientTimeout(total=DEADLINE_S))
            if old is not None:
                # Requests under way may still use it; they end within their deadline.
                asyncio.get_running_loop().call_later(DEADLINE_S, lambda: asyncio.ensure_future(old.close()))
            return self._session


def _login() -> kopf.ConnectionInfo:
    info = login()
    if info is None:
        raise Unavailable("there is neither a service account nor a kubeconfig")
    return info


def _session(info: kopf.ConnectionInfo, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=info.as_ssl_context(), limit=CONNECTIONS)
    return aiohttp.ClientSession(connector=connector, headers=info.as_http_headers(), timeout=timeout)


def _event(line: bytes) -> tuple[str, Raw]:
    """One line of a watch. Errors: ApiError for what the server has to complain of, ValueError."""
    event = json.loads(line)
    found = event["object"]
    if event["type"] == "ERROR":
        raise ApiError(int(found.get("code", 500)), str(found.get("reason", "")), str(found.get("message", "")))
    return event["type"], found["metadata"]


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
