"""The client of the API server, for the node plugin and the command: blocking requests over the official library.

The library `kubernetes` does what kubectl does: contexts, TLS, renewal of tokens, exec plugins, proxies. Bodies are
plain mappings. The library is imported with the first client, because that takes a third of a second and 35 MB, and
most verbs of the command need no client. Nothing is retried here; callers that follow an object use Outage. Any thread
may call. Errors of every method: AccessDenied, CredentialsInvalid, Conflict, Unreachable, NotFound (unless the method
says otherwise), else InvalidRequest. Their texts contain the server's message.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datastore.api.resources import Resource
from datastore.errors import (
    AccessDenied,
    CredentialsInvalid,
    DatastoreError,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    Unreachable,
)
from datastore.tls import judged_alike

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration

Object = dict[str, Any]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEADLINE_S = 10.0
"""The timeout for the connection and for each part of an answer, in the node plugin, for which the kubelet waits."""
COMMAND_DEADLINE_S = 30.0
"""The same for a command, which a busy cluster may keep waiting; kubectl waits as long for a connection."""
OUTAGE_S = 600.0
"""How long a caller that follows work in the cluster waits for an API server that is away; the work continues."""
PAGE = 500
DEFAULT_NAMESPACE = "default"
EVERYWHERE = ""
"""The value of `namespace` that stands for all namespaces."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
CONFLICT = 409


class Conflict(DatastoreError):
    """The object has changed since it was read."""


class Outage:
    """How long the API server has been away, as seen by one caller that asks it again and again."""

    def __init__(self) -> None:
        self._since: float | None = None

    def bear(self, error: Unreachable) -> bool:
        """Note a failure; return whether it is the first in a row. Errors: `error`, after OUTAGE_S of failures."""
        if self._since is None:
            self._since = time.monotonic()
            return True
        if time.monotonic() - self._since > OUTAGE_S:
            raise error
        return False

    def over(self) -> None:
        """Note that the API server has answered."""
        self._since = None


class KubeClient:
    """A client with a login for one API server. namespace: used by calls that name none."""

    def __init__(self, api: ApiClient, namespace: str = DEFAULT_NAMESPACE, *, deadline_s: float = DEADLINE_S) -> None:
        self._api = api
        self._deadline_s = deadline_s
        self.namespace = namespace

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Object | None:
        """Return an object; None when it does not exist."""
        try:
            return _object(self._send("GET", resource.path(self._space(namespace), name)))
        except NotFound:
            return None

    def list(self, resource: Resource, *, namespace: str | None = None, selector: str = "") -> list[Object]:
        """Return all objects, or those that a label selector matches; they are requested page by page."""
        items: list[Object] = []
        query = {"limit": str(PAGE), "labelSelector": selector, "continue": ""}
        while True:
            given = [(name, text) for name, text in query.items() if text]
            page = _object(self._send("GET", resource.path(self._space(namespace)), query=given))
            items += page.get("items") or []
            query["continue"] = page.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return items

    def patch(
        self, resource: Resource, name: str, change: Mapping[str, Any] | Sequence[Any], *, namespace: str | None = None
    ) -> Object:
        """Change an object: a mapping is a merge patch (RFC 7396), a sequence a JSON patch (RFC 6902)."""
        kind = MERGE_PATCH if isinstance(change, Mapping) else JSON_PATCH
        path = resource.path(self._space(namespace), name)
        return _object(self._send("PATCH", path, body=change, content_type=kind))

    def create(self, resource: Resource, body: Mapping[str, Any], *, namespace: str | None = None) -> Object:
        """Create an object. Errors: Conflict when an object has its name already."""
        return _object(self._send("POST", resource.path(self._space(namespace)), body=body))

    def delete(self, resource: Resource, name: str, *, namespace: str | None = None) -> bool:
        """Request the deletion of an object and its dependents; return whether the object existed."""
        body = {"propagationPolicy": "Background"}
        try:
            self._send("DELETE", resource.path(self._space(namespace), name), body=body)
        except NotFound:
            return False
        return True

    def text(self, path: str, query: Sequence[tuple[str, str]] = ()) -> str:
        """Return the answer of the API server, or of what it is a proxy for, to a GET of this path."""
        return self._send("GET", path, query=query).decode(errors="replace")

    def _space(self, namespace: str | None) -> str:
        return self.namespace if namespace is None else namespace

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = JSON,
    ) -> bytes:
        import urllib3.exceptions
        from kubernetes.client import ApiException

        what = f"{method} {path}"
        try:
            headers = {"Accept": "*/*", "Content-Type": content_type}
            _, url, headers, _, _ = self._api.param_serialize(
                method, path, query_params=list(query), header_params=headers, auth_settings=["BearerToken"]
            )
            # The body is a plain mapping, not one of the library's models, and a null in it must be sent.
            answer = self._api.call_api(method, url, headers, body, _request_timeout=self._deadline_s)
            content: bytes = answer.read()  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise Unreachable(f"the API server does not answer: {_reason(error)}") from None
        except ValueError:  # its text may hold the token
            raise CredentialsInvalid("the login at the API server can't be sent: is its token one line?") from None
        if answer.status >= 400:
            raise _error(answer.status, f"{what}: the API server says: {_message(answer.status, content)}")
        return content


def of_context(environment: Mapping[str, str], namespace: str = "") -> KubeClient:
    """Return a client for kubectl's current context (KUBECONFIG, else ~/.kube/config), else with the pod's own login.
    namespace '': the one of the context or the pod. Errors: DatastoreError when there is no usable login."""
    path = os.path.expanduser(environment.get("KUBECONFIG") or "~/.kube/config")
    wrong = f"there is no {path}"
    if any(map(os.path.exists, path.split(os.pathsep))):  # without a cluster, nobody waits for the library
        from kubernetes import config

        try:
            _, active = config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
            configuration = _configuration()
            config.load_kube_config(path, client_configuration=configuration)  # type: ignore[no-untyped-call]
            space = namespace or active["context"].get("namespace") or DEFAULT_NAMESPACE
            return KubeClient(_client(configuration), space, deadline_s=COMMAND_DEADLINE_S)
        except config.ConfigException as error:
            wrong = str(error)
    inside = in_cluster(environment)
    if inside is None:
        raise DatastoreError(f"no cluster is configured for you: {wrong} (KUBECONFIG, ~/.kube/config)")
    inside.namespace = namespace or inside.namespace
    return inside


def in_cluster(environment: Mapping[str, str], account: Path = ACCOUNT) -> KubeClient | None:
    """Return a client with the pod's service account; None outside a pod. The token is read again each minute."""
    if not environment.get("KUBERNETES_SERVICE_HOST") or not (account / "token").exists():
        return None
    from kubernetes.config import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader

    configuration = _configuration()
    given = {"KUBERNETES_SERVICE_PORT": "443", **environment}
    try:
        loader = InClusterConfigLoader(  # type: ignore[no-untyped-call]
            token_filename=str(account / "token"), cert_filename=str(account / "ca.crt"), environ=given
        )
        loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise InvalidManifest(f"the service account in {account} can't be used: {error}") from None
    space = account / "namespace"
    return KubeClient(_client(configuration), space.read_text().strip() if space.exists() else DEFAULT_NAMESPACE)


def _configuration() -> Configuration:
    from kubernetes.client import Configuration

    made = Configuration()
    made.retries = False  # only the caller retries
    return made


def _client(configuration: Configuration) -> ApiClient:
    """Return the library's client, with a TLS context of ours. Errors: InvalidManifest."""
    import urllib3
    from kubernetes.client import ApiClient

    try:
        tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidManifest(f"the certificate authority of the cluster can't be read: {error}") from None
    if not configuration.verify_ssl:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        urllib3.disable_warnings()  # the kubeconfig says so: kubectl does not warn of each request either
    made = ApiClient(configuration)
    made.rest_client.pool_manager.connection_pool_kw["ssl_context"] = judged_alike(tls)
    return made


def _object(content: bytes) -> Object:
    try:
        document = json.loads(content)
    except ValueError:
        raise Unreachable("what answers as the API server sends no JSON") from None
    return document if isinstance(document, dict) else {}


def _message(status: int, content: bytes) -> str:
    """Return the message of a Status (meta/v1), or the beginning of an answer that is something else."""
    try:
        said = json.loads(content).get("message")
    except (ValueError, AttributeError):
        said = content.decode(errors="replace").strip()[:200]
    return str(said or f"status {status}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def _error(status: int, text: str) -> DatastoreError:
    if status == 401:
        return CredentialsInvalid(f"{text}; log in to the cluster again")
    if status == CONFLICT:
        return Conflict(text)
    if status in (429, 500, 502, 503, 504):
        return Unreachable(text)
    return {403: AccessDenied, 404: NotFound}.get(status, InvalidRequest)(text)
