"""An NFS host as a StorageClass with `provisioner: ssh` knows it, and exports on it as the controller makes them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datastore.api.source import NFSLocation, SSHCredentials
from datastore.backends.base import Ensured, Identity
from datastore.backends.nfs.hostexport import HostExport
from datastore.backends.nfs.parameters import parse_ssh
from datastore.backends.nfs.ssh import HostAddress, Hosts
from datastore.secret import Secret
from tests.nfs.host.server import NFSServer

EVERYBODY = ("10.99.0.0/24",)


@dataclass(kw_only=True)
class Class:
    """A class whose root is a directory of this test's own. clients: what the cluster's nodes are."""

    host: NFSServer
    hosts: Hosts = field(default_factory=Hosts)
    name: str = field(default_factory=lambda: f"ds-{uuid.uuid4().hex[:8]}")
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    nodes: Sequence[str] = EVERYBODY
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> str:
        return f"/srv/{self.name}"

    @property
    def known_hosts(self) -> str:
        return (self.host.directory / "known_hosts").read_text()

    def all_parameters(self) -> dict[str, str]:
        given = {"provisioner": "ssh", "host": self.host.address, "root": self.root, "knownHosts": self.known_hosts}
        return {**given, **self.parameters}

    def credentials(self) -> SSHCredentials:
        return SSHCredentials(username="root", private_key=Secret((self.host.directory / "id").read_text()))

    def export(
        self,
        name: str = "digits",
        *,
        namespace: str = "team",
        uid: str = "",
        capacity: int | None = 16 << 20,
        made: bool = False,
        **address: Any,
    ) -> HostExport:
        parameters = parse_ssh(self.all_parameters())
        given = {"host": parameters.host, "port": parameters.port, "known_hosts": parameters.known_hosts}
        return HostExport(
            Identity(namespace=namespace, name=name, uid=uid or f"uid-{name}"),
            parameters,
            HostAddress(**{**given, "credentials": self.credentials(), **address}),
            self.hosts,
            lambda: self.nodes,
            capacity_bytes=capacity,
            class_uid=self.uid,
            made=made,
        )

    def left(self) -> dict[str, Any]:
        """All that is on the host because of this class: names below the root, files of exports, limits, clients."""
        script = f"""
cd {self.root}
echo "== names"; ls -A | grep -v '^.datastore.lock$' || true
echo "== exports"; grep -l '{self.root}/' /etc/exports.d/* /etc/exports.d/.[a-z]* 2>/dev/null || true
echo "== served"; grep '^{self.root}/' /var/lib/nfs/etab || true
"""
        found: dict[str, list[str]] = {}
        for line in self.host.shell(script).splitlines():
            if line.startswith("== "):
                found[line[3:]] = []
            else:
                found[list(found)[-1]].append(line)
        return found


def location(ensured: Ensured) -> NFSLocation:
    """Where it is exported."""
    assert isinstance(ensured.source, NFSLocation)
    return ensured.source
