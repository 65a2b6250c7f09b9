"""Merges a Datastore with its StorageClass into the effective spec and the Secret. Pure.

A class holds the administrator's choices in `parameters`; docs/reference/storageclass.md lists them. What a class names
(a Secret in the administrator's namespace, a bucket) is never mixed with what a user names: a Datastore has either a
backend and a Secret of its own namespace, or a class and no backend. So no user reaches, with the administrator's keys,
anything that the class did not choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datastore.api.datastore import API_VERSION, KIND, Datastore, DatastoreSpec
from datastore.api.endpoints import AWS
from datastore.api.names import DEFAULT_NFS_CLASS
from datastore.api.volumecontext import DRIVER, memory_of
from datastore.backends.classparameters import filled, truth
from datastore.backends.registry import KINDS, BackendKind
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.mistakes import Mistake, parsed
from datastore.errors import InvalidManifest

Raw = Mapping[str, Any]

DEFAULT_KIND = "s3"
_SPEC = ("attributes", "metadataTTL")
_SECRET = ("secretName", "csi.storage.k8s.io/node-publish-secret-name")
_SECRET_NAMESPACE = ("secretNamespace", "csi.storage.k8s.io/node-publish-secret-namespace")
COMMON = frozenset({"backend", *_SPEC, "cacheSize", "capacity", "memory", "readOnly", *_SECRET, *_SECRET_NAMESPACE})
"""The parameters of a class with any kind of backend; each kind adds its own (backends/registry.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """Where a Secret is."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSpec:
    """A Datastore merged with its class. spec: has a backend of this kind; class_name, class_uid: '' without a class.

    by_default: the Datastore names no class and has the default one. mount_options: the class's (uid=, gid=, umask=),
    for the volume. memory: the class's ceiling for one mount server, '' for that of the nodes. parameters: those of the
    class that belong to the kind. provisioned_by: see BackendKind.provisioner.
    """

    namespace: str
    name: str
    uid: str
    spec: DatastoreSpec
    kind: BackendKind
    secret: SecretRef | None
    class_name: str = ""
    class_uid: str = ""
    by_default: bool = False
    mount_options: tuple[str, ...] = ()
    memory: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    provisioned_by: str = ""


def class_name_of(body: Raw, classes: Iterable[Raw]) -> str | None:
    """Return the name of a Datastore's StorageClass: the one that it names, or with `nfs: {}` the default one, or None.

    A Datastore keeps the class that was the default when it was made, because its data is there. Of several default
    classes the newest counts, as in Kubernetes.
    """
    spec = body.get("spec")
    if not isinstance(spec, Mapping) or not wants_default_class(body):
        return spec.get("storageClassName") if isinstance(spec, Mapping) else None
    chosen = (body.get("status") or {}).get("storageClassName")
    if chosen:
        return str(chosen)
    marked = [each["metadata"] for each in classes if _is_default(each)]
    newest = max(marked, key=lambda each: (each.get("creationTimestamp", ""), each["name"]), default=None)
    return str(newest["name"]) if newest else None


def wants_default_class(body: Raw) -> bool:
    """Whether a Datastore asks for an NFS export of its own and names no class (`nfs: {}`)."""
    spec = body.get("spec")
    return isinstance(spec, Mapping) and isinstance(spec.get("nfs"), Mapping) and not spec["nfs"].get("server")


def _is_default(storage_class: Raw) -> bool:
    annotations = storage_class["metadata"].get("annotations") or {}
    return storage_class.get("provisioner") == DRIVER and annotations.get(DEFAULT_NFS_CLASS) == "true"


def effective_spec(body: Raw, storage_class: Raw | None, settings: Settings) -> EffectiveSpec:
    """Return what a Datastore object asks for, with its class's choices. Errors: Mistake."""
    metadata = body["metadata"]
    datastore = parsed(body, Datastore)
    spec, namespace = datastore.spec, metadata["namespace"]
    chosen: Raw = {}
    by_default = wants_default_class(body)
    if by_default and storage_class is None:
        if (body.get("status") or {}).get("storageClassName"):
            _ours(body["status"]["storageClassName"], None)
        text = (
            "spec.nfs: {} needs a default StorageClass for NFS; the administrator marks one: "
            f"kubectl annotate storageclass NAME {DEFAULT_NFS_CLASS}=true"
        )
        raise Mistake("StorageClassNotFound", text, permanent=True)
    if by_default and storage_class is not None:
        spec = spec.model_copy(update={"storage_class_name": storage_class["metadata"]["name"], "nfs": None})
    if spec.storage_class_name is None:
        secret = SecretRef(namespace=namespace, name=spec.credentials_secret) if spec.credentials_secret else None
    else:
        chosen = _ours(spec.storage_class_name, storage_class)
        spec, secret = _from_class(spec, metadata, chosen)
    elsewhere = datastore.spec.s3
    if elsewhere and not settings.policy.allows(elsewhere.endpoint):
        text = f"spec.s3.endpoint: the administrator does not allow {elsewhere.endpoint or AWS}"
        raise Mistake("EndpointNotAllowed", text, permanent=True)
    if by_default and not spec.nfs:
        text = f"StorageClass {chosen['metadata']['name']} is the default for NFS, and its backend is {spec.backend}"
        raise Mistake("StorageClassInvalid", text, permanent=True)
    _check_servers(datastore.spec, settings)
    kind = _allowed(spec, secret, settings)
    parameters = chosen.get("parameters") or {}
    own = {name: text for name, text in parameters.items() if name in kind.parameters}
    return EffectiveSpec(
        namespace=namespace,
        name=datastore.name,
        uid=metadata["uid"],
        spec=spec,
        kind=kind,
        secret=secret,
        class_name=chosen["metadata"]["name"] if chosen else "",
        class_uid=chosen["metadata"].get("uid", "") if chosen else "",
        by_default=by_default,
        mount_options=tuple(chosen.get("mountOptions") or ()),
        memory=parameters.get("memory", ""),
        parameters=own,
        provisioned_by=_provisioned_by(body, chosen, kind.provisioner(spec, own)) if chosen else "",
    )


def _provisioned_by(body: Raw, storage_class: Raw, named: str) -> str:
    """Return where the data is made, if it is where it was made. named: by the class. Errors: Mistake."""
    before = (body.get("status") or {}).get("provisionedBy") or named
    if before != named:
        text = (
            f"the data is at {before}, and StorageClass {storage_class['metadata']['name']} now names {named}: "
            "make the class again as it was"
        )
        raise Mistake("StorageClassChanged", text, permanent=True)
    return named


def _check_servers(spec: DatastoreSpec, settings: Settings) -> None:
    """Refuse servers that trust the nodes' addresses, unless the administrator lists them. Errors: Mistake."""
    if spec.nfs and spec.nfs.server and not settings.policy.allows_export(spec.nfs.server):
        url = f"nfs://{spec.nfs.server}"
        text = f"spec.nfs.server: the administrator allows NFS servers by name (ALLOW_ENDPOINTS={url})"
        raise Mistake("EndpointNotAllowed", text, permanent=True)
    for server in spec.glusterfs.servers if spec.glusterfs else ():
        if not settings.policy.allows_export(server, "glusterfs"):
            url = f"glusterfs://{server}"
            text = f"spec.glusterfs.servers: the administrator allows servers by name (ALLOW_ENDPOINTS={url})"
            raise Mistake("EndpointNotAllowed", text, permanent=True)


def _allowed(spec: DatastoreSpec, secret: SecretRef | None, settings: Settings) -> BackendKind:
    """Return the kind of a spec's backend. Errors: Mistake if no cluster serves it or the administrator forbids it."""
    kind = KINDS.get(spec.backend)
    if kind is None:
        text = f"spec.{spec.backend} is for laptops only (datastore mount): no cluster serves it"
        raise Mistake("BackendNotSupported", text, permanent=True)
    if spec.local and spec.local.path not in settings.local_paths:
        text = f"spec.local.path: the administrator does not allow {spec.local.path} (--allow-local of the controller)"
        raise Mistake("LocalNotAllowed", text, permanent=True)
    if spec.local and spec.read_only:
        text = "spec.readOnly: Kubernetes mounts a directory of a node writable; leave it out, and set readOnly at the"
        raise Mistake("InvalidSpec", f"{text} volume of each pod that only reads", permanent=True)
    if spec.cache.dir is not None:
        text = "spec.cache.dir is for laptops; in a cluster the administrator chooses it"
        raise Mistake("InvalidSpec", text, permanent=True)
    if kind.credentials and secret is None and not settings.ambient_credentials:
        field_name = f"spec.{kind.name}.credentialsSecret"
        text = f"name a Secret in {field_name}, or use a storageClassName; the cluster lends no identity"
        raise Mistake("CredentialsMissing", text, permanent=True)
    return kind


def _ours(name: str, storage_class: Raw | None) -> Raw:
    if storage_class is None:
        raise Mistake("StorageClassNotFound", f"there is no StorageClass {name}", permanent=True)
    if storage_class.get("provisioner") != DRIVER:
        text = f"StorageClass {name} is not of the provisioner {DRIVER}; wrap it as spec.claim.storageClassName"
        raise Mistake("StorageClassNotOurs", text, permanent=True)
    return storage_class


def _from_class(spec: DatastoreSpec, metadata: Raw, storage_class: Raw) -> tuple[DatastoreSpec, SecretRef | None]:
    try:
        document, secret = _chosen(storage_class.get("parameters") or {}, metadata)
        made = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": document}
        chosen = parsed(made, Datastore).spec
    except (InvalidManifest, Mistake) as error:
        where = f"StorageClass {spec.storage_class_name}: parameters"
        raise Mistake("StorageClassInvalid", f"{where}: {error}", permanent=True) from None
    backend = chosen.backend
    if spec.only_for_s3 and not chosen.s3:
        where = f"the backend of StorageClass {spec.storage_class_name} is {backend}"
        text = f"spec.{spec.only_for_s3[0]} is for s3 only, and {where}; leave it out, or choose another class"
        raise Mistake("InvalidSpec", text, permanent=True)
    update: dict[str, Any] = {backend: getattr(chosen, backend), "storage_class_name": None}
    for name in ("attributes", "metadata_ttl"):
        update[name] = getattr(spec, name) if getattr(spec, name) is not None else getattr(chosen, name)
    update["capacity"] = spec.capacity if spec.capacity is not None else chosen.capacity
    update["read_only"] = spec.read_only or chosen.read_only
    update["cache"] = spec.cache if "cache" in spec.model_fields_set and spec.cache.model_fields_set else chosen.cache
    return spec.model_copy(update=update), secret


def _chosen(parameters: Mapping[str, str], metadata: Raw) -> tuple[dict[str, Any], SecretRef | None]:
    """Return the spec and the Secret that a class's parameters ask for. Errors: InvalidManifest."""
    named = parameters.get("backend", DEFAULT_KIND)
    kind = KINDS.get(named)
    if kind is None or kind.from_class is None:
        possible = ", ".join(name for name, each in KINDS.items() if each.from_class is not None)
        raise InvalidManifest(f"backend: a class can't make {named}; it can make {possible}")
    unknown = sorted(set(parameters) - COMMON - kind.parameters)
    if unknown:
        raise InvalidManifest(f"{unknown[0]} is not known; there are {', '.join(sorted(COMMON | kind.parameters))}")
    values = {f"pvc.{name}": str(metadata[name]) for name in ("namespace", "name", "uid")}
    own = {name: text for name, text in parameters.items() if name in kind.parameters and text}
    document: dict[str, Any] = {named: kind.from_class(own, partial(filled, values=values))}
    document |= {name: parameters[name] for name in (*_SPEC, "capacity") if name in parameters}
    if "memory" in parameters:
        memory_of(parameters["memory"])
    if "cacheSize" in parameters:
        document["cache"] = {"size": parameters["cacheSize"]}
    if "readOnly" in parameters:
        document["readOnly"] = truth("readOnly", parameters["readOnly"])
    return document, _secret(parameters, str(metadata["namespace"]))


def _secret(parameters: Mapping[str, str], of_claim: str) -> SecretRef | None:
    """Return a class's Secret. ${pvc.namespace} stands for the Datastore's own, so that each namespace has its keys."""
    name = next((parameters[key] for key in _SECRET if key in parameters), "")
    template = next((parameters[key] for key in _SECRET_NAMESPACE if key in parameters), "")
    namespace = filled(template, {"pvc.namespace": of_claim})
    if bool(name) != bool(namespace):
        raise InvalidManifest("secretName and secretNamespace go together")
    return SecretRef(namespace=namespace, name=name) if name else None
