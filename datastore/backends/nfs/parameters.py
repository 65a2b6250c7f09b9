"""Parses and checks the parameters of a StorageClass with `backend: nfs`. Pure. See docs/reference/storageclass.md."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from datastore.api.fields import HOST_PATTERN, PATH_PATTERN, matches
from datastore.backends.nfs.ssh import known_hosts
from datastore.errors import InvalidManifest

SSH = frozenset(
    {
        *("provisioner", "host", "port", "server", "root", "knownHosts"),
        *("clients", "squash", "group", "quota", "exportOptions"),
    }
)
GANESHA = frozenset({"provisioner", "namespace", "claimStorageClass", "image", "clients", "squash", "group"})
NODES = "nodes"
GANESHA_IMAGE = "localhost/datastore-ganesha:latest"
"""The image that manifests/managed-nfs/Dockerfile makes."""
_LABEL_PATTERN = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_NAME_PATTERN = "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
_IMAGE_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}$"
NOBODY = 65534
"""The uid of a squashed user on the server, and the gid unless `group` is set."""
Squash = Literal["none", "root", "all"]
_SQUASH: Mapping[str, Squash] = {"none": "none", "root": "root", "all": "all"}
_EXPORT_OPTIONS = frozenset(
    {
        *("sync", "async", "wdelay", "no_wdelay", "secure", "insecure", "subtree_check", "no_subtree_check"),
        *("acl", "no_acl", "sec=sys", "sec=krb5", "sec=krb5i", "sec=krb5p"),
    }
)
"""Those options of exports(5) that don't change which clients may mount, as which users, and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which clients may use an export, and as which users.

    clients: networks such as 10.0.0.0/8; None: the cluster's nodes. squash: which users of a client are NOBODY on the
    server: none of them, root, or all. group: of the exported directory, for pods with this fsGroup; None: all users of
    the pods may write to the directory.
    """

    clients: tuple[str, ...] | None
    squash: Squash
    group: int | None

    @property
    def owner(self) -> tuple[int, int, int]:
        """uid, gid and mode of the exported directory when it is made."""
        uid = NOBODY if self.squash == "all" else 0
        if self.group is not None:
            return uid, self.group, 0o2770
        return (uid, uid, 0o770) if self.squash == "all" else (uid, uid, 0o777)

    def networks(self, nodes: Callable[[], Sequence[str]]) -> list[str]:
        """Return the networks of the present clients. nodes: returns the addresses of the cluster's nodes."""
        given = nodes() if self.clients is None else self.clients
        return sorted({str(ipaddress.ip_network(each)) for each in given})


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHParameters:
    """A class with `provisioner: ssh`. server: the host's name or address for NFS; quota: whether XFS sets limits."""

    host: str
    port: int
    server: str
    root: str
    known_hosts: str
    quota: bool
    options: tuple[str, ...]
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class GaneshaParameters:
    """A class with `provisioner: ganesha`. namespace: of the servers; claim_class: the StorageClass of their claims."""

    namespace: str
    claim_class: str
    image: str
    access: Access


def parse(parameters: Mapping[str, str]) -> SSHParameters | GaneshaParameters:
    """Parse all parameters. Errors: InvalidManifest, whose text begins with the parameter's name."""
    return parse_ganesha(parameters) if parameters.get("provisioner") == "ganesha" else parse_ssh(parameters)


def parse_ganesha(parameters: Mapping[str, str]) -> GaneshaParameters:
    """Parse the parameters of a class with `provisioner: ganesha`. Errors: see parse()."""
    _check_known(parameters, GANESHA)
    return GaneshaParameters(
        namespace=_checked(parameters, "namespace", _LABEL_PATTERN),
        claim_class=_checked(parameters, "claimStorageClass", _NAME_PATTERN),
        image=_checked(parameters, "image", _IMAGE_PATTERN, GANESHA_IMAGE),
        access=_access(parameters),
    )


def parse_ssh(parameters: Mapping[str, str]) -> SSHParameters:
    """Parse the parameters of a class with `provisioner: ssh`. Errors: see parse()."""
    if parameters.get("provisioner") != "ssh":
        raise InvalidManifest("provisioner must be ssh (exports on an NFS host) or ganesha (servers in the cluster)")
    _check_known(parameters, SSH)
    access = _access(parameters)
    host = _checked(parameters, "host", HOST_PATTERN)
    port = _number(parameters, "port", 22, 65535)
    if not any(True for _ in known_hosts(parameters.get("knownHosts", ""))):
        raise InvalidManifest("knownHosts is missing: the host's public keys, as `ssh-keyscan HOST` prints them")
    root = _checked(parameters, "root", PATH_PATTERN)
    if ".." in root.split("/") or root.strip("/") == "":
        raise InvalidManifest("root must be a directory of the NFS host's own for Datastores, such as /srv/datastores")
    if "\\" in root:
        raise InvalidManifest("root must have no backslash: exportfs reads it as the beginning of a code")
    quota = parameters.get("quota", "xfs")
    if quota not in ("xfs", "none"):
        raise InvalidManifest("quota must be xfs (project quotas) or none")
    options = tuple(each for each in parameters.get("exportOptions", "").replace(" ", "").split(",") if each)
    refused = [each for each in options if each not in _EXPORT_OPTIONS]
    if refused:
        raise InvalidManifest(f"exportOptions: {refused[0]} is none of {', '.join(sorted(_EXPORT_OPTIONS))}")
    return SSHParameters(
        host=host,
        port=port,
        server=_checked(parameters, "server", HOST_PATTERN, host),
        root=root,
        known_hosts=parameters["knownHosts"],
        quota=quota == "xfs",
        options=options,
        access=access,
    )


def limit(capacity_bytes: int | None) -> int:
    """Return the capacity of an export that has a limit. capacity_bytes: of the Datastore, else of its class. Errors:
    InvalidManifest without one."""
    if capacity_bytes is None:
        raise InvalidManifest("capacity is missing: of the Datastore, or as a parameter of its StorageClass")
    return capacity_bytes


def asks_for_nodes(parameters: Mapping[str, str]) -> bool:
    """Return whether a class with these parameters needs the nodes' addresses."""
    return parameters.get("clients", NODES) == NODES


def _access(parameters: Mapping[str, str]) -> Access:
    squash = _SQUASH.get(parameters.get("squash", "none"))
    if squash is None:
        raise InvalidManifest("squash must be none, root or all")
    group = _number(parameters, "group", 0, 2**32 - 2) if "group" in parameters else None
    text = parameters.get("clients", NODES)
    if text == NODES:
        return Access(clients=None, squash=squash, group=group)
    try:
        networks = [ipaddress.ip_network(each) for each in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidManifest(f"clients must be nodes, or networks such as 10.0.0.0/16: {error}") from None
    if not networks:
        raise InvalidManifest("clients must be nodes, or networks such as 10.0.0.0/16")
    return Access(clients=tuple(map(str, networks)), squash=squash, group=group)


def _checked(parameters: Mapping[str, str], name: str, pattern: str, otherwise: str | None = None) -> str:
    text = parameters.get(name, otherwise)
    if text is None:
        raise InvalidManifest(f"{name} is missing")
    if text != otherwise and (not matches(pattern, text) or len(text) > 1024):
        raise InvalidManifest(f"{name}: {text[:64]!r} is not what it has to be")
    return text


def _number(parameters: Mapping[str, str], name: str, otherwise: int, largest: int) -> int:
    text = parameters.get(name, str(otherwise))
    if not text.isdecimal() or int(text) > largest:
        raise InvalidManifest(f"{name} must be a number up to {largest}")
    return int(text)


def _check_known(parameters: Mapping[str, str], known: frozenset[str]) -> None:
    for name in sorted(set(parameters) - known):
        text = f"{name} is not for provisioner {parameters['provisioner']}; there are {', '.join(sorted(known))}"
        raise InvalidManifest(text)
