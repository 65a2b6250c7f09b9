"""The few requests to the API server that controllers make, by the official client (`kubernetes.aio`).

Bodies are plain mappings: the package's models of every kind would take memory and hide what is sent. Each request is
counted by verb and resource, so that a test can compare them with the RBAC rules. Only the event loop may call this.
Errors: ApiError with the server's status, reason and message; Unavailable when there is no answer; the fence's own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from datastore.api.names import MANAGER
from datastore.api.resources import BY_KIND, NAMESPACES, Resource
from datastore.controller.runtime.metrics import API_REQUESTS

Raw = Mapping[str, Any]
Fence = Callable[[], None]
"""A function that raises when this process may not write any more."""

DEADLINE_S = 20.0
CONNECTIONS = 16
WATCH_S = 600
"""Seconds after which a watch ends; its caller then begins a new one."""
SILENCE_S = 150.0
"""Seconds without an event after which a watch counts as dead: the API server sends a bookmark each minute."""
LINE_BYTES = 4 << 20
"""The longest event that is read, in bytes; it is more than etcd keeps of one object."""
ANSWER_BYTES = 64 << 20
"""The longest answer that is read. A page of PAGE objects of etcd's largest size is longer, but no real one is."""
PAGE = 500
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_METHODS = {"get": "GET", "list": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}


class ApiError(Exception):
    """The API server refused a request. status: the HTTP status; reason: the server's CamelCase word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the API server: {message}")
        self.status = status
        self.reason = reason

    @property
    def namespace_ends(self) -> bool:
        """Whether the object was refused because its namespace is being deleted."""
        return self.status == 403 and "being terminated" in str(self)

    @property
    def refusal(self) -> str:
        """The message if a person has to change something: a quota, a limit, a policy, or the object; else ''."""
        if self.status not in (400, 403, 422) or self.namespace_ends:
            return ""
        return f"the cluster does not accept what is needed, and is asked again: {self}"


class Unavailable(Exception):
    """The API server did not answer."""


class Client:
    """Logs in at the first request, with the pod's service account or else KUBECONFIG. The owner has to close it.

    fence: called before each writing request, once its connection stands: a process that was paused until then sends
    nothing.
    """

    def __init__(self, fence: Fence | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._fence = fence
        self._deadline_s = deadline_s
        self._requests: ApiClient | None = None
        self._watches: ApiClient | None = None

    async def close(self) -> None:
        """Release connections; idempotent."""
        for api in (self._requests, self._watches):
            if api is not None:
                await api.close()  # type: ignore[no-untyped-call]
        self._requests = self._watches = None

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object, None when there is none."""
        try:
            return await self._send("get", resource, resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, resource: Resource, namespace: str, field_selector: str = "", label_selector: str = ""
    ) -> list[dict[str, Any]]:
        """Return all objects of a namespace ('' for all) that the selectors match."""
        async with aclosing(self.pages(resource, namespace, field_selector, label_selector)) as pages:
            return [each async for items, _ in pages for each in items]

    async def pages(
        self,
        resource: Resource,
        namespace: str,
        field_selector: str = "",
        label_selector: str = "",
        *,
        limit: int = PAGE,
    ) -> AsyncGenerator[tuple[Sequence[dict[str, Any]], str], None]:
        """Yield the objects page by page, each page with the version of the list, from which a watch can continue."""
        query = {"limit": str(limit), "fieldSelector": field_selector, "labelSelector": label_selector, "continue": ""}
        while True:
            given = {name: text for name, text in query.items() if text}
            found = await self._send("list", resource, resource.path(namespace), query=given)
            metadata = found.get("metadata", {})
            yield found.get("items", []), metadata.get("resourceVersion", "")
            query["continue"] = metadata.get("continue", "")
            if not query["continue"]:
                return

    async def watch(
        self, resource: Resource, namespace: str, *, whole: bool = False, version: str = "0"
    ) -> AsyncGenerator[tuple[str, Raw], None]:
        """Yield (type, metadata) of all that exists in the namespace ('' for all), then of each change, for WATCH_S.

        Only metadata is sent, since no more of a Secret is wanted. whole: yield (type, object) instead. version: that
        of a list, to yield only what changed after it. Errors: ApiError, Unavailable.
        """
        API_REQUESTS.labels("watch", resource.plural).inc()
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(WATCH_S)
        accept = _JSON if whole else _METADATA
        if self._watches is None:
            # Watches have connections of their own: they last, and must not take those of the requests.
            self._watches = await _logged_in(connections=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE_S, sock_read=SILENCE_S)
        try:
            answer = await _call(self._watches, "GET", resource.path(namespace), None, query, accept, _JSON, timeout)
            async with answer:
                if answer.status >= 400:
                    _parsed(answer.status, await answer.read())
                async for line in _lines(answer):
                    kind, found = _event(line)
                    yield kind, found if whole else found["metadata"]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"the watch of {resource.plural} ended: {type(error).__name__}") from error

    async def create(self, resource: Resource, namespace: str, body: Raw) -> dict[str, Any]:
        """Make an object; ApiError 409 when it is there."""
        return await self._send("create", resource, resource.path(namespace), body, {"fieldManager": MANAGER})

    async def update(self, resource: Resource, body: Raw) -> dict[str, Any]:
        """Replace an object; ApiError 409 when its resourceVersion is not the newest."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"])
        return await self._send("update", resource, path, body, {"fieldManager": MANAGER})

    async def apply(self, body: Raw, subresource: str = "") -> dict[str, Any]:
        """Apply an object: it then has these fields, and has lost those that we applied before and left out now."""
        resource, metadata = BY_KIND[body["kind"]], body["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        return await self._send("patch", resource, path, body, {"fieldManager": MANAGER, "force": "true"}, _APPLY)

    async def merge(self, resource: Resource, body: Raw, change: Raw, subresource: str = "") -> dict[str, Any] | None:
        """Merge a change into the object with this uid and return it; None when no object has this name and uid."""
        metadata = body["metadata"]
        whole = {**change, "metadata": {**change.get("metadata", {}), "uid": metadata["uid"]}}
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        try:
            return await self._send("patch", resource, path, whole, {"fieldManager": MANAGER}, _MERGE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return None

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        """Delete the object with this uid, no other of its name; return what finalizers still hold of it, or None."""
        # By default the API server would leave the pods of a Job behind.
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            left = await self._send("delete", resource, resource.path(namespace, name), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return None
        return left if left.get("kind") != "Status" and left.get("metadata", {}).get("finalizers") else None

    async def namespace_ends(self, namespace: str) -> bool:
        """Return whether a namespace is gone or is being deleted."""
        body = await self.get(NAMESPACES, "", namespace)
        return body is None or "deletionTimestamp" in body["metadata"]

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server serves this kind; a kind whose CRD was just made is served a moment later."""
        status, text = await self._answer("GET", resource.path("").rpartition("/")[0], None, {}, _JSON, _JSON)
        if status == 404:
            return False
        return any(each.get("name") == resource.plural for each in _parsed(status, text).get("resources", []))

    async def text(self, path: str, query: Mapping[str, str]) -> str:
        """Return the API server's answer to a GET as text, for example the log of a pod."""
        _, text = await self._answer("GET", path, None, query, "*/*", _JSON)
        return text.decode(errors="replace")

    async def _send(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Raw | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
    ) -> dict[str, Any]:
        subresource = path.rsplit("/", 1)[1] if path.endswith("/status") else ""
        API_REQUESTS.labels(verb, resource.plural + (f"/{subresource}" if subresource else "")).inc()
        status, text = await self._answer(_METHODS[verb], path, body, query or {}, _JSON, content_type)
        return _parsed(status, text)

    async def _answer(
        self, method: str, path: str, body: Raw | None, query: Mapping[str, str], accept: str, content_type: str
    ) -> tuple[int, bytes]:
        if self._requests is None:
            self._requests = await _logged_in(CONNECTIONS, self._fence)
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        try:
            answer = await _call(self._requests, method, path, body, query, accept, content_type, timeout)
            async with answer:
                text = await answer.content.read(ANSWER_BYTES)
                while chunk := await answer.content.read(ANSWER_BYTES - len(text)):
                    text += chunk
                if not answer.content.at_eof():
                    raise Unavailable(f"the answer to {method} {path} is longer than {ANSWER_BYTES >> 20} MiB")
                if answer.status >= 400 and accept != _JSON:
                    _parsed(answer.status, text)
                return answer.status, text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"the API server does not answer: {type(error).__name__}") from error


async def _logged_in(connections: int, fence: Fence | None = None) -> ApiClient:
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        try:
            await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except ConfigException as error:
            raise Unavailable(f"there is neither a service account nor a kubeconfig: {error}") from None
    configuration.connection_pool_maxsize = connections
    configuration.disable_strict_ssl_verification = True  # see datastore/tls.py
    configuration.retries = False  # only one layer retries: the controller's loop
    if fence is not None:
        configuration.trace_configs = [_fenced(fence)]
    return ApiClient(configuration)


def _fenced(fence: Fence) -> aiohttp.TraceConfig:
    """Return the hooks that call the fence once a writing request has its connection, right before it is sent."""

    async def note(_: object, context: SimpleNamespace, request: aiohttp.TraceRequestStartParams) -> None:
        context.writes = request.method != "GET"

    async def check(_: object, context: SimpleNamespace, __: object) -> None:
        if context.writes:
            fence()

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(note)
    trace.on_connection_create_end.append(check)
    trace.on_connection_reuseconn.append(check)
    return trace


async def _call(
    api: ApiClient,
    method: str,
    path: str,
    body: Raw | None,
    query: Mapping[str, str],
    accept: str,
    content_type: str,
    timeout: aiohttp.ClientTimeout,
) -> aiohttp.ClientResponse:
    request = await api.param_serialize(
        method,
        path,
        query_params=list(query.items()),
        header_params={"Accept": accept, "Content-Type": content_type},
        body=body,
        auth_settings=["BearerToken"],
    )
    found = await api.call_api(*request, _request_timeout=timeout)
    answer: aiohttp.ClientResponse = found.response
    return answer


async def _lines(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield lines of up to LINE_BYTES; aiohttp's own iteration ends at 128 KiB. Errors: ValueError."""
    left = b""
    async for chunk in answer.content.iter_any():
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(left) > LINE_BYTES:
            raise ValueError("an event is too long")


def _event(line: bytes) -> tuple[str, Raw]:
    """Parse one line of a watch. Errors: ApiError for an ERROR event; ValueError when it is not JSON."""
    event = json.loads(line)
    found = event["object"]
    if event["type"] == "ERROR":
        raise ApiError(int(found.get("code", 500)), str(found.get("reason", "")), str(found.get("message", "")))
    return event["type"], found


def _parsed(status: int, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = {}
    if status >= 400:
        # A refusal can quote the request's body, but never a Secret, since Secrets are only read.
        raise ApiError(status, str(document.get("reason", "")), str(document.get("message", f"HTTP {status}")))
    found: dict[str, Any] = document
    return found
