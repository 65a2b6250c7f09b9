"""datastore.backends.nfs.hostexport: what is refused before a host is asked. tests/nfs has the rest, on a real host."""

from __future__ import annotations

import pytest

from datastore.api.source import SSHCredentials
from datastore.backends.base import Identity
from datastore.backends.nfs.hostexport import HostExport
from datastore.backends.nfs.parameters import parse_ssh
from datastore.backends.nfs.ssh import HostAddress, Hosts
from datastore.errors import InvalidManifest, Unreachable
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import nfs_class


@promise("S-282")
@pytest.mark.parametrize(("quota", "error"), [("xfs", InvalidManifest), ("none", Unreachable)])
def test_an_export_without_a_capacity_needs_a_class_without_quotas(quota: str, error: type[Exception]) -> None:
    """Otherwise one Datastore could fill the host's disk, and nothing would say so."""
    given = nfs_class(quota=quota, clients="10.0.0.0/8", host="127.0.0.1", port="1")["parameters"]
    parameters = parse_ssh(
        {name: given[name] for name in given if name not in ("backend", "secretName", "secretNamespace")}
    )
    address = HostAddress(host="127.0.0.1", port=1, known_hosts=parameters.known_hosts, credentials=SSHCredentials())
    hosts = Hosts()
    identity = Identity(namespace="team", name="digits", uid="0b6d")
    export = HostExport(
        identity, parameters, address, hosts, lambda: (), capacity_bytes=None, class_uid="c-1", made=False
    )
    try:
        with pytest.raises(error, match="capacity is missing" if error is InvalidManifest else "127.0.0.1"):
            export.ensure()
    finally:
        hosts.close()
