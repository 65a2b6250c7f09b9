"""The kinds of backends that a cluster serves: what differs between them, in one place.

A kind has the name of its field in the spec. Other code looks up here what it needs to know of a kind, so that a new
kind is an entry of KINDS and a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from datastore.api.datastore import DatastoreSpec, location_of
from datastore.api.endpoints import AWS, EndpointPolicy
from datastore.api.names import volume_name
from datastore.api.resolve import source_of
from datastore.api.secretmanifest import SecretManifest, ssh_credentials_from
from datastore.api.source import GlusterFSLocation, S3Location
from datastore.backends.base import Backend, Cluster, Identity
from datastore.backends.classparameters import check_unambiguous, truth
from datastore.backends.elsewhere import ElsewhereBackend
from datastore.backends.glusterfs import GlusterFSBackend
from datastore.backends.nfs import parameters as nfs
from datastore.backends.nfs.ganesha import GaneshaExport
from datastore.backends.nfs.hostexport import HostExport
from datastore.backends.nfs.ssh import HostAddress, Hosts
from datastore.backends.s3 import S3Backend
from datastore.backends.stores import Stores
from datastore.errors import InvalidManifest

Filled = Callable[[str], str]
"""Fills the variables of a StorageClass's parameter, such as ${pvc.name}. Errors: InvalidManifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a backend is opened with.

    parameters, class_uid: of its StorageClass; only the parameters of this kind. policy: None if an administrator named
    the server, by a StorageClass. nodes: returns the addresses of the cluster's nodes; Errors: Unreachable when they
    are not known yet. made: the place was made before, so it is an error if its data is not there.
    """

    identity: Identity
    spec: DatastoreSpec
    secret: SecretManifest | None
    stores: Stores
    hosts: Hosts
    cluster: Cluster
    nodes: Callable[[], Sequence[str]]
    parameters: Mapping[str, str]
    class_uid: str
    policy: EndpointPolicy | None
    made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """A kind of backend.

    name: of its field in the spec. volume: how pods get the data: by our CSI driver, as a directory of the node, or by
    the claim of another driver. open: makes the backend; Errors: InvalidManifest for a value that the Secret lacks.
    credentials: mounts need a Secret, or an identity that the administrator lends. removable: data can be made for a
    Datastore, so that Delete and Archive have an effect. exported: an export can be made for a Datastore; a check of it
    that times out does not undo an earlier good one. parameters: those that a StorageClass may have. from_class: makes
    the field of the spec from them (Errors: InvalidManifest); None: a class can't choose this kind. needs_nodes: if a
    class with these parameters needs the nodes' addresses. server: a key, equal for Datastores that fail together;
    None: they can't be probed from here. provisioner: names, for people, the place where a class has the data made.
    claim: the namespace and name of the claim of ours that has the data; None: there is none.
    """

    name: str
    volume: Literal["csi", "hostPath", "claim"]
    open: Callable[[Opening], Backend]
    credentials: bool = False
    removable: bool = False
    exported: bool = False
    parameters: frozenset[str] = frozenset()
    from_class: Callable[[Mapping[str, str], Filled], dict[str, Any]] | None = None
    needs_nodes: Callable[[Mapping[str, str]], bool] = lambda _: False
    server: Callable[[Opening], Hashable] = lambda _: None
    provisioner: Callable[[DatastoreSpec, Mapping[str, str]], str] = lambda _spec, _parameters: ""
    claim: Callable[[Mapping[str, str], str], tuple[str, str] | None] = lambda _parameters, _uid: None


_S3_PARAMETERS = frozenset({"bucket", "prefix", "endpoint", "region", "caBundle", "forcePathStyle", "create"})
DEFAULT_PREFIX = "${pvc.namespace}/${pvc.name}/"


def _s3_location(opening: Opening) -> S3Location:
    source = source_of(opening.spec, opening.secret)
    assert isinstance(source, S3Location), "a spec with s3 is one"
    return source


def _open_s3(opening: Opening) -> Backend:
    location = replace(_s3_location(opening), policy=opening.policy)
    writable = not opening.spec.read_only
    return S3Backend(location, opening.identity, opening.stores, writable=writable, made=opening.made)


def _s3_from_class(parameters: Mapping[str, str], filled: Filled) -> dict[str, Any]:
    if "bucket" not in parameters:
        raise InvalidManifest("bucket is missing")
    document: dict[str, Any] = {"prefix": DEFAULT_PREFIX, **parameters}
    check_unambiguous(f"{document['bucket']}/{document['prefix']}")
    document |= {name: filled(document[name]) for name in ("bucket", "prefix")}
    return document | {
        name: truth(name, parameters[name]) for name in ("forcePathStyle", "create") if name in parameters
    }


def _s3_provisioner(spec: DatastoreSpec, _parameters: Mapping[str, str]) -> str:
    assert spec.s3 is not None, "a class with this kind makes one"
    return f"{location_of(spec)} on {spec.s3.endpoint or AWS}"


def _s3_server(opening: Opening) -> Hashable:
    """Return the key of all Datastores with this bucket and keys: they fail together and have the same capabilities."""
    return replace(_s3_location(opening), prefix="", create=False)


def _nfs_from_class(parameters: Mapping[str, str], _filled: Filled) -> dict[str, Any]:
    nfs.parse(parameters)
    return {}


def _open_nfs(opening: Opening) -> Backend:
    if opening.spec.nfs is not None and opening.spec.nfs.server is not None:
        return ElsewhereBackend(source_of(opening.spec, None), "an export that was there before stays as it is")
    chosen = nfs.parse(opening.parameters)
    if isinstance(chosen, nfs.GaneshaParameters):
        capacity = opening.spec.capacity
        return GaneshaExport(
            opening.identity,
            chosen,
            opening.cluster,
            opening.nodes,
            capacity_bytes=capacity,
            made=opening.made,
        )
    return HostExport(
        opening.identity,
        chosen,
        _nfs_host(opening, chosen),
        opening.hosts,
        opening.nodes,
        capacity_bytes=opening.spec.capacity,
        class_uid=opening.class_uid,
        made=opening.made,
    )


def _nfs_host(opening: Opening, chosen: nfs.SSHParameters) -> HostAddress:
    if opening.secret is None:
        raise InvalidManifest("secretName and secretNamespace are missing: the Secret with username and ssh-privatekey")
    credentials = ssh_credentials_from(opening.secret)
    return HostAddress(host=chosen.host, port=chosen.port, known_hosts=chosen.known_hosts, credentials=credentials)


def _nfs_server(opening: Opening) -> Hashable:
    """Return the key of all exports below one root of a host: they fail together and have the same capabilities."""
    if opening.spec.nfs is not None and opening.spec.nfs.server is not None:
        return None
    chosen = nfs.parse(opening.parameters)
    if isinstance(chosen, nfs.GaneshaParameters):
        return None
    return (_nfs_host(opening, chosen).key, chosen.root)


def _glusterfs_location(opening: Opening) -> GlusterFSLocation:
    source = source_of(opening.spec, None)
    assert isinstance(source, GlusterFSLocation), "a spec with glusterfs is one"
    return source


def _open_glusterfs(opening: Opening) -> Backend:
    return GlusterFSBackend(_glusterfs_location(opening))


def _glusterfs_server(opening: Opening) -> Hashable:
    """Return the key of all volumes of these servers: they fail together."""
    return _glusterfs_location(opening).servers


def _nfs_provisioner(_spec: DatastoreSpec, parameters: Mapping[str, str]) -> str:
    chosen = nfs.parse(parameters)
    if isinstance(chosen, nfs.GaneshaParameters):
        return f"NFS servers in namespace {chosen.namespace}"
    return f"NFS host {chosen.server}, root {chosen.root}"


def _nfs_claim(parameters: Mapping[str, str], uid: str) -> tuple[str, str] | None:
    """Return the claim from which an NFS server in the cluster serves the data."""
    if parameters.get("provisioner") != "ganesha":
        return None
    return parameters.get("namespace", ""), volume_name(uid)


def _open_local(opening: Opening) -> Backend:
    return ElsewhereBackend(source_of(opening.spec, None), "a directory of the node stays as it is")


KINDS: Mapping[str, BackendKind] = {
    kind.name: kind
    for kind in (
        BackendKind(
            name="s3",
            volume="csi",
            open=_open_s3,
            credentials=True,
            removable=True,
            parameters=_S3_PARAMETERS,
            from_class=_s3_from_class,
            server=_s3_server,
            provisioner=_s3_provisioner,
        ),
        BackendKind(
            name="nfs",
            volume="csi",
            open=_open_nfs,
            removable=True,
            exported=True,
            parameters=nfs.SSH | nfs.GANESHA,
            from_class=_nfs_from_class,
            needs_nodes=nfs.asks_for_nodes,
            server=_nfs_server,
            provisioner=_nfs_provisioner,
            claim=_nfs_claim,
        ),
        BackendKind(name="glusterfs", volume="csi", open=_open_glusterfs, server=_glusterfs_server),
        BackendKind(
            name="claim",
            volume="claim",
            open=lambda _: ElsewhereBackend(None, "the storage of another driver stays as it is"),
        ),
        BackendKind(name="local", volume="hostPath", open=_open_local),
    )
}
