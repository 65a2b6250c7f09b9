"""datastore.backends.nfs.parameters: what a StorageClass for NFS may say."""

from __future__ import annotations

import pytest

from datastore.backends.nfs.parameters import asks_for_nodes, parse, parse_ssh
from datastore.errors import InvalidManifest
from tests.promises import promise

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIJ9Sfy1AYqU3zTzV0n2yOaY1iGZ0mTPrXHWVlM6n9N5Z"
SSH = {"provisioner": "ssh", "host": "nas", "root": "/srv/datastores", "knownHosts": f"nas ssh-ed25519 {KEY}\n"}


def test_a_class_says_where_and_the_rest_has_defaults() -> None:
    found = parse_ssh(SSH)
    assert (found.host, found.port, found.server, found.root, found.quota) == ("nas", 22, "nas", SSH["root"], True)
    assert (found.access.clients, found.access.squash, found.access.owner) == (None, "none", (0, 0, 0o777))
    other = parse_ssh(
        {**SSH, "port": "2222", "server": "10.0.0.1", "quota": "none", "exportOptions": "async, insecure"}
    )
    assert (other.port, other.server, other.quota, other.options) == (2222, "10.0.0.1", False, ("async", "insecure"))


@pytest.mark.parametrize(
    ("given", "owner"),
    [
        ({"squash": "root"}, (0, 0, 0o777)),
        ({"squash": "all"}, (65534, 65534, 0o770)),
        ({"group": "2000"}, (0, 2000, 0o2770)),
        ({"squash": "all", "group": "2000"}, (65534, 2000, 0o2770)),
    ],
)
def test_whoever_is_meant_can_write(given: dict[str, str], owner: tuple[int, int, int]) -> None:
    assert parse({**SSH, **given}).access.owner == owner


@promise("S-283")
def test_clients_are_the_nodes_or_networks() -> None:
    nodes = parse(SSH).access
    assert nodes.networks(lambda: ["fd00::1", "10.0.0.7", "10.0.0.7"]) == ["10.0.0.7/32", "fd00::1/128"]
    given = parse({**SSH, "clients": "10.1.0.0/16, 192.168.7.9 fd00::/64"}).access
    assert given.networks(lambda: ["1.2.3.4"]) == ["10.1.0.0/16", "192.168.7.9/32", "fd00::/64"]
    assert asks_for_nodes(SSH)
    assert not asks_for_nodes({**SSH, "clients": "10.1.0.0/16"})


@promise("S-285")
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"provisioner": "cephfs"}, "provisioner must be"),
        ({"host": ""}, "host"),
        ({"host": "nas; reboot"}, "host"),
        ({"host": "-oProxyCommand=reboot"}, "host"),
        ({"port": "70000"}, "port must be a number"),
        ({"root": "srv"}, "root"),
        ({"root": "/srv/../etc"}, "root"),
        ({"root": "/"}, "root"),
        ({"root": "/srv/a\nb"}, "root"),
        ({"root": "/srv/a\\040b"}, "root must have no backslash"),
        ({"knownHosts": ""}, "knownHosts is missing"),
        ({"knownHosts": "nas ssh-ed25519"}, "knownHosts must be lines"),
        ({"knownHosts": "nas ssh-ed25519 AAAA"}, "knownHosts"),
        ({"knownHosts": f"@revoked nas ssh-ed25519 {KEY}"}, "knownHosts must be lines"),
        ({"clients": "*"}, "clients must be nodes, or networks"),
        ({"clients": "10.0.0.0/33"}, "clients must be nodes, or networks"),
        ({"clients": "10.0.0.1(rw,no_root_squash)"}, "clients must be nodes, or networks"),
        ({"clients": ""}, "clients must be nodes, or networks"),
        ({"squash": "some"}, "squash must be"),
        ({"group": "root"}, "group must be a number"),
        ({"quota": "zfs"}, "quota must be"),
        ({"exportOptions": "anonuid=0"}, "exportOptions: anonuid=0"),
        ({"exportOptions": "rw) *(rw"}, "exportOptions"),
    ],
)
def test_a_wrong_parameter_is_named(given: dict[str, str], complaint: str) -> None:
    """Nothing that could mean something else to the host gets past here."""
    with pytest.raises(InvalidManifest, match=complaint):
        parse({**SSH, **given})
