"""Decides to which servers tenants may make the controller and the nodes connect, by name and address. Pure.

The author of a Datastore, or of a pod with an inline volume, chooses a server; the controller and the nodes send
requests there and report the answers. They reach more than a tenant's pod does: the node itself, a cloud's metadata
service with the machine's keys, other tenants' services. So two things are checked.

- May the manifest name this endpoint? If there are patterns (ALLOW_ENDPOINTS), the endpoint must match one of them.
- May this address be connected to? Each address to which a host really leads is checked when the connection is made, so
  that no notation of an address and no answer of a name server evades the check. The smallest range that contains the
  address decides; of two ranges of the same size the allowed one does. A host that the administrator names in full may
  also lead to a private address or to this machine.

A laptop has no administrator but the user: there is no policy, and nothing is denied.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal
from urllib.parse import SplitResult, urlsplit

AWS = "https://s3.amazonaws.com"
"""The endpoint that is meant when a manifest names none."""
ENVIRONMENT = ("ALLOW_ENDPOINTS", "ALLOW_RANGES", "DENY_RANGES")
"""Variables of controller and node plugin, in the order of EndpointPolicy's fields; commas or blanks separate items."""
_API_SERVER = "KUBERNETES_SERVICE_HOST"
_TRUSTING = ("nfs://", "glusterfs://")
"""Schemes of servers that ask for no keys, since they trust the addresses of the nodes."""
_PORTS = {"http": 80, "https": 443}

_METADATA = "an address of a cloud's metadata service"
_LINK_LOCAL = "a link-local address, where clouds keep the credentials of machines"
_HERE = "an address of this machine"
_PRIVATE = "a private address"
_RESERVED = "not the address of one machine"
NEVER: Mapping[str, str] = {
    "169.254.0.0/16": _LINK_LOCAL,
    "fe80::/10": _LINK_LOCAL,
    "100.100.100.200/32": _METADATA,  # Alibaba
    "168.63.129.16/32": _METADATA,  # Azure
    "192.0.0.0/24": _METADATA,  # Oracle: 192.0.0.192; otherwise reserved
    "fd00:ec2::/32": _METADATA,  # AWS
    "fd00:c1::/32": _METADATA,  # Oracle
    "fd20:ce::/32": _METADATA,  # Google
    "fd00:42::/32": _METADATA,  # Scaleway
    "fd00:a9fe:a9fe::/48": _METADATA,  # Akamai
    "0.0.0.0/8": _HERE,
    "::/128": _HERE,
    "224.0.0.0/4": _RESERVED,
    "240.0.0.0/4": _RESERVED,
    "ff00::/8": _RESERVED,
}
"""Denied ranges, and why. Naming a host does not allow them, only an ALLOW_RANGES range that is at least as small."""
INSIDE: Mapping[str, str] = {
    "127.0.0.0/8": _HERE,
    "::1/128": _HERE,
    "10.0.0.0/8": _PRIVATE,
    "172.16.0.0/12": _PRIVATE,
    "192.168.0.0/16": _PRIVATE,
    "100.64.0.0/10": _PRIVATE,
    "198.18.0.0/15": _PRIVATE,
    "fc00::/7": _PRIVATE,
    "fec0::/10": _PRIVATE,
    "64:ff9b:1::/48": _PRIVATE,
}
"""Ranges that are denied unless the administrator names the host, and why; pods and services have such addresses."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPolicy:
    """What an administrator allows. Errors: ValueError for ranges of another form.

    endpoints: SCHEME://HOST[:PORT], HOST may hold `*`; without patterns for S3 every S3 endpoint is allowed.
    allow_ranges, deny_ranges: addresses and ranges such as 10.1.2.3 and 10.0.0.0/8.
    """

    endpoints: tuple[str, ...] = ()
    allow_ranges: tuple[str, ...] = ()
    deny_ranges: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in (*self.allow_ranges, *self.deny_ranges):
            ipaddress.ip_network(text)

    def allows(self, endpoint: str) -> bool:
        """Return whether a tenant may name this S3 endpoint; '' is AWS."""
        patterns = [pattern for pattern in self.endpoints if not pattern.startswith(_TRUSTING)]
        return not patterns or any(_fits(endpoint or AWS, pattern) for pattern in patterns)

    def allows_export(self, server: str, kind: Literal["nfs", "glusterfs"] = "nfs") -> bool:
        """Return whether a tenant may name this NFS or GlusterFS server: it must be listed, as nfs://HOST.

        The server asks for no keys but trusts the nodes' addresses, so a tenant who may name it reads what they read.
        """
        scheme = f"{kind}://"
        url = f"{scheme}[{server}]" if ":" in server else scheme + server
        return any(_fits(url, pattern) for pattern in self.endpoints if pattern.startswith(scheme))

    def refusal(self, endpoint: str, address: str) -> str:
        """Return why connecting to this address is not allowed, such as 'a private address'; '' if it is.

        endpoint: as in the manifest. address: where its host, or BUCKET.HOST, really leads, as a socket shows it.
        """
        denied = {**NEVER, **dict.fromkeys(self.deny_ranges, "an address that the administrator denies")}
        if not self._names(endpoint):
            denied = {**INSIDE, **denied}
        for each in _stands_for(ipaddress.ip_address(address.partition("%")[0])):
            size, why = max(((_size(text, each), why) for text, why in denied.items()), key=lambda found: found[0])
            if size > max((_size(text, each) for text in self.allow_ranges), default=-1):
                return why
        return ""

    def _names(self, endpoint: str) -> bool:
        """Return whether the administrator lists this very endpoint, without wildcards."""
        return any(_fits(endpoint or AWS, pattern) for pattern in self.endpoints if not set("*?") & set(pattern))


def policy_from(environment: Mapping[str, str], *more: Sequence[str]) -> EndpointPolicy:
    """Return the policy of a process in a cluster. more: items besides those of the variables, in ENVIRONMENT's order.

    The API server's address is denied unless this very address is allowed. Errors: ValueError with a text for people.
    """
    given = [environment.get(name, "").replace(",", " ").split() for name in ENVIRONMENT]
    for items, others in zip(given, more, strict=False):
        items += others
    server = environment.get(_API_SERVER, "")
    with suppress(ValueError):  # not set, or a host name
        given[2].append(str(ipaddress.ip_network(server)))
    try:
        return EndpointPolicy(
            endpoints=tuple(given[0]), allow_ranges=tuple(given[1]), deny_ranges=tuple(dict.fromkeys(given[2]))
        )
    except ValueError as error:
        raise ValueError(
            f"ALLOW_RANGES and DENY_RANGES hold addresses and ranges such as 10.0.0.0/8: {error}"
        ) from None


def _fits(endpoint: str, pattern: str) -> bool:
    asked, wanted = urlsplit(endpoint), urlsplit(pattern)
    same = (asked.scheme, _port(asked)) == (wanted.scheme, _port(wanted))
    return same and fnmatchcase(_host(asked), _host(wanted))


def _host(parts: SplitResult) -> str:
    return (parts.hostname or "").removesuffix(".")


def _port(parts: SplitResult) -> int | None:
    return parts.port or _PORTS.get(parts.scheme)


def _size(text: str, address: Address) -> int:
    """Return how small a range is, as the length of its prefix; -1 if it does not contain the address."""
    network: Network = ipaddress.ip_network(text)
    return network.prefixlen if address.version == network.version and address in network else -1


def _stands_for(address: Address) -> Iterator[Address]:
    """Yield the address, and the IPv4 addresses to which packets for it are forwarded."""
    if not isinstance(address, ipaddress.IPv6Address):
        yield address
        return
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    compatible = int(address) >> 32 == 0 and int(address) > 1
    isatap = (int(address) >> 32) & 0xFDFFFFFF == 0x5EFE
    if compatible or isatap or address in ipaddress.IPv6Network("64:ff9b::/96"):
        yield low
