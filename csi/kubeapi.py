"""The little that the node plugin asks of the API server: its Node's start-up taint, Datastores by name and their use.

By the standard library: four calls do not need a client library. The token is read anew each time, because the
kubelet renews it. Source: the Kubernetes API reference (nodes, patch by JSON merge).
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datastore.api.datastore import GROUP, VERSION
from datastore.api.names import volume_name
from datastore.api.volumecontext import DRIVER, VolumeHandle
from datastore.errors import AccessDenied, DatastoreError, NotFound, Unreachable

from .errors import Refused

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
MERGE_PATCH = "application/merge-patch+json"
CONFLICT = 409
TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What an inline volume that names a Datastore is of. secret: of the Datastore's namespace; '': it has none.

    ending: it is being deleted.
    """

    attributes: Mapping[str, str]
    secret: str
    ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeApi:
    """The API server of the cluster that we run in. account: directory of the service account."""

    url: str
    account: Path = ACCOUNT

    def named(self, namespace: str, name: str) -> Named:
        """A Datastore's volume. Errors: NotFound, Refused when it has none of ours, AccessDenied, Unreachable."""
        found = self._datastore(namespace, name)
        if (found.get("spec") or {}).get("claim"):
            raise Refused(f"Datastore {namespace}/{name} is another driver's volume; use its claim")
        try:
            volume = self._call("GET", f"/api/v1/persistentvolumes/{volume_name(found['metadata']['uid'])}")
        except NotFound:
            raise Refused(f"Datastore {namespace}/{name} has no volume yet; kubectl describe dst says why") from None
        csi = volume.get("spec", {}).get("csi") or {}
        if csi.get("driver") != DRIVER:
            raise Refused(f"Datastore {namespace}/{name} is no volume of {DRIVER}; use its claim")
        secret = csi.get("nodePublishSecretRef") or {}
        return Named(
            attributes=dict(csi.get("volumeAttributes") or {}),
            secret=str(secret.get("name", "")) if secret.get("namespace") == namespace else "",
            ending="deletionTimestamp" in found["metadata"],
        )

    def usage_of(self, handle: VolumeHandle) -> tuple[int, int] | None:
        """Bytes and objects as counted; None: not yet. Errors: NotFound, AccessDenied, Unreachable."""
        found = self._datastore(handle.namespace, handle.name)
        if found["metadata"]["uid"] != handle.uid:
            raise NotFound(f"Datastore {handle.namespace}/{handle.name} is another one now")
        usage = (found.get("status") or {}).get("usage") or {}
        stored, objects = usage.get("bytes"), usage.get("objects")
        return (stored, objects) if isinstance(stored, int) and isinstance(objects, int) else None

    def _datastore(self, namespace: str, name: str) -> dict[str, Any]:
        try:
            return self._call("GET", f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/datastores/{name}")
        except NotFound:
            raise NotFound(f"there is no Datastore {name} in namespace {namespace}") from None

    def remove_taint(self, node: str, key: str) -> bool:
        """Whether it was there. Errors: NotFound, AccessDenied, Unreachable."""
        for _ in range(TRIES):
            found = self._call("GET", f"/api/v1/nodes/{node}")
            taints = found.get("spec", {}).get("taints") or []
            kept = [taint for taint in taints if taint.get("key") != key]
            if len(kept) == len(taints):
                return False
            # With the version, so that a taint which another one adds meanwhile is not lost.
            version = found["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": kept or None}}
            try:
                self._call("PATCH", f"/api/v1/nodes/{node}", patch)
            except _Conflict:
                continue
            return True
        raise Unreachable(f"the taint {key} of node {node} could not be removed: the node keeps changing")

    def _call(self, method: str, path: str, patch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310  (the URL is the API server's)
            self.url + path,
            method=method,
            data=None if patch is None else json.dumps(patch).encode(),
            headers={"Authorization": f"Bearer {(self.account / 'token').read_text().strip()}"},
        )
        if patch is not None:
            request.add_header("Content-Type", MERGE_PATCH)
        tls = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls) as answer:  # noqa: S310
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            raise _error(error, f"{method} {path}") from None
        except (OSError, ValueError) as error:
            raise Unreachable(f"the API server does not answer: {error}") from None
        return document if isinstance(document, dict) else {}


class _Conflict(DatastoreError):
    """Somebody was faster."""


def in_cluster(environment: Mapping[str, str], account: Path = ACCOUNT) -> KubeApi | None:
    """The API server by what the kubelet puts into every container; None outside of a cluster."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        return None
    return KubeApi(url=f"https://{f'[{host}]' if ':' in host else host}:{port}", account=account)


def _error(error: urllib.error.HTTPError, what: str) -> DatastoreError:
    text = f"{what}: the API server says {error.code} {error.reason}"
    if error.code == CONFLICT:
        return _Conflict(text)
    if error.code in {401, 403}:
        return AccessDenied(f"{text}; the RBAC rules of the node plugin have to allow it")
    return NotFound(text) if error.code == 404 else Unreachable(text)
