"""From a Datastore and its StorageClass to what is really meant: the effective spec and the Secret. Pure.

A class holds the administrator's choices in `parameters`; docs/reference/storageclass.md lists them. What a class names
(a Secret in the administrator's namespace, a bucket) is never mixed with what a user names: a Datastore either has a
backend, with a Secret of its own namespace, or a class and no backend. So nobody reaches with the administrator's keys
what the class did not choose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from datastore.api import endpoints
from datastore.api.datastore import API_VERSION, KIND, Datastore, DatastoreSpec
from datastore.api.explain import explain
from datastore.api.volumecontext import DRIVER, memory_of
from datastore.controller.mistakes import Mistake
from datastore.controller.settings import Settings
from datastore.errors import InvalidManifest

Raw = Mapping[str, Any]

_S3 = {
    "bucket": "bucket",
    "prefix": "prefix",
    "endpoint": "endpoint",
    "region": "region",
    "caBundle": "caBundle",
}
_S3_FLAGS = {"forcePathStyle": "forcePathStyle", "create": "create"}
_SPEC = {"attributes": "attributes", "metadataTTL": "metadataTTL"}
_SECRET = ("secretName", "csi.storage.k8s.io/node-publish-secret-name")
_SECRET_NAMESPACE = ("secretNamespace", "csi.storage.k8s.io/node-publish-secret-namespace")
_OTHER = {"cacheSize", "memory", "readOnly", *_SECRET, *_SECRET_NAMESPACE}
PARAMETERS = frozenset({*_S3, *_S3_FLAGS, *_SPEC, *_OTHER})
DEFAULT_PREFIX = "${pvc.namespace}/${pvc.name}/"
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """A Secret by its place."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """A Datastore with every choice made. spec has a backend; class_name is '' without a class.

    mount_options: of the class, for the volume; as ours has them (uid=, gid=, umask=). memory: of the class, for the
    mounts' servers; '': as the nodes have it.
    """

    namespace: str
    name: str
    uid: str
    spec: DatastoreSpec
    secret: SecretRef | None
    class_name: str = ""
    mount_options: tuple[str, ...] = ()
    memory: str = ""


def meant(body: Raw, storage_class: Raw | None, settings: Settings) -> Meant:
    """What a Datastore object asks for. Errors: Mistake."""
    metadata = body["metadata"]
    datastore = _parsed({key: body.get(key) for key in ("apiVersion", "kind", "spec")} | {"metadata": _names(metadata)})
    spec, namespace = datastore.spec, metadata["namespace"]
    if spec.storage_class_name is None:
        named = spec.s3.credentials_secret if spec.s3 else None
        secret = SecretRef(namespace=namespace, name=named) if named else None
    else:
        spec, secret = _from_class(spec, metadata, storage_class)
    elsewhere = datastore.spec.s3
    if elsewhere and not endpoints.allowed(elsewhere.endpoint, settings.endpoints):
        text = f"spec.s3.endpoint: the administrator does not allow {elsewhere.endpoint or endpoints.AWS}"
        raise Mistake("EndpointNotAllowed", text, permanent=True)
    _check_allowed(spec, secret, settings)
    chosen = (storage_class or {}) if datastore.spec.storage_class_name else {}
    return Meant(
        namespace=namespace,
        name=datastore.name,
        uid=metadata["uid"],
        spec=spec,
        secret=secret,
        class_name=datastore.spec.storage_class_name or "",
        mount_options=tuple(chosen.get("mountOptions") or ()),
        memory=(chosen.get("parameters") or {}).get("memory", ""),
    )


def _names(metadata: Raw) -> Raw:
    return {"name": metadata["name"], "namespace": metadata["namespace"]}


def _parsed(document: Raw) -> Datastore:
    try:
        return Datastore.model_validate(document)
    except ValidationError as error:
        # No `from`: pydantic's text holds the input.
        raise Mistake("InvalidSpec", explain(error, Datastore), permanent=True) from None


def _check_allowed(spec: DatastoreSpec, secret: SecretRef | None, settings: Settings) -> None:
    if spec.nfs or spec.glusterfs:
        raise Mistake("BackendNotSupported", f"spec.{spec.backend} is not supported yet", permanent=True)
    if spec.local and spec.local.path not in settings.local_paths:
        text = "spec.local is for development: the administrator allows each directory by --allow-local"
        raise Mistake("LocalNotAllowed", text, permanent=True)
    if spec.cache.dir is not None:
        text = "spec.cache.dir is for laptops; in a cluster the administrator chooses it"
        raise Mistake("InvalidSpec", text, permanent=True)
    if spec.s3 and secret is None and not settings.ambient_credentials:
        text = "name a Secret in spec.s3.credentialsSecret, or use a storageClassName; the cluster lends no identity"
        raise Mistake("CredentialsMissing", text, permanent=True)


def _from_class(
    spec: DatastoreSpec, metadata: Raw, storage_class: Raw | None
) -> tuple[DatastoreSpec, SecretRef | None]:
    name = spec.storage_class_name
    if storage_class is None:
        raise Mistake("StorageClassNotFound", f"there is no StorageClass {name}", permanent=True)
    if storage_class.get("provisioner") != DRIVER:
        text = f"StorageClass {name} is not of the provisioner {DRIVER}; wrap it as spec.claim.storageClassName"
        raise Mistake("StorageClassNotOurs", text, permanent=True)
    where = f"StorageClass {name}: parameters"
    try:
        document, secret = _chosen(storage_class.get("parameters") or {}, metadata)
        chosen = _parsed({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": document}).spec
    except (InvalidManifest, Mistake) as error:
        raise Mistake("StorageClassInvalid", f"{where}: {error}", permanent=True) from None
    update: dict[str, Any] = {"s3": chosen.s3, "storage_class_name": None}
    for field in ("attributes", "metadata_ttl"):
        update[field] = getattr(spec, field) if getattr(spec, field) is not None else getattr(chosen, field)
    update["read_only"] = spec.read_only or chosen.read_only
    update["cache"] = spec.cache if "cache" in spec.model_fields_set and spec.cache.model_fields_set else chosen.cache
    return spec.model_copy(update=update), secret


def _chosen(parameters: Mapping[str, str], metadata: Raw) -> tuple[dict[str, Any], SecretRef | None]:
    """The spec that the parameters make, and the Secret. Errors: InvalidManifest."""
    unknown = sorted(set(parameters) - PARAMETERS)
    if unknown:
        raise InvalidManifest(f"{unknown[0]} is not known; there are {', '.join(sorted(PARAMETERS))}")
    if "bucket" not in parameters:
        raise InvalidManifest("bucket is missing")
    given = {"prefix": DEFAULT_PREFIX, **parameters}
    _check_unambiguous(f"{given['bucket']}/{given['prefix']}")
    s3: dict[str, Any] = {field: given[key] for key, field in _S3.items() if given.get(key)}
    for field in ("bucket", "prefix"):
        if field in s3:
            s3[field] = _filled(s3[field], metadata)
    s3 |= {field: _truth(key, parameters[key]) for key, field in _S3_FLAGS.items() if key in parameters}
    document: dict[str, Any] = {"s3": s3} | {field: given[key] for key, field in _SPEC.items() if key in given}
    if "memory" in given:
        memory_of(given["memory"])
    if "cacheSize" in given:
        document["cache"] = {"size": given["cacheSize"]}
    if "readOnly" in given:
        document["readOnly"] = _truth("readOnly", given["readOnly"])
    return document, _secret(parameters)


def _secret(parameters: Mapping[str, str]) -> SecretRef | None:
    name = next((parameters[key] for key in _SECRET if key in parameters), "")
    namespace = next((parameters[key] for key in _SECRET_NAMESPACE if key in parameters), "")
    if bool(name) != bool(namespace):
        raise InvalidManifest("secretName and secretNamespace go together")
    return SecretRef(namespace=namespace, name=name) if name else None


def _check_unambiguous(template: str) -> None:
    """Two different claims must not become one place: `a-b` + `c` and `a` + `b-c` would, joined by a hyphen."""
    for first, between in re.findall(r"\$\{(pvc\.name(?:space)?)\}([^$]*)(?=\$\{)", template):
        safe = "/" in between or (first == "pvc.namespace" and "." in between)
        if not safe:
            raise InvalidManifest(f"put a '/' after ${{{first}}}, so that no two claims share a place")


def _filled(template: str, metadata: Raw) -> str:
    values = {"pvc.namespace": metadata["namespace"], "pvc.name": metadata["name"], "pvc.uid": metadata["uid"]}

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise InvalidManifest(f"${{{found[1]}}} is not known; there are {', '.join(values)}")
        return str(values[found[1]])

    return _VARIABLE.sub(value, template)


def _truth(key: str, text: str) -> bool:
    if text not in _TRUTH:
        raise InvalidManifest(f"{key} must be 'true' or 'false'")
    return _TRUTH[text]
