"""Which servers a user may have us ask. Pure.

Whoever writes a Datastore, or a pod with an inline volume, chooses a URL, and the controller or the node sends requests
there and tells what came back. So link-local addresses, where clouds keep the credentials of machines, are never asked
unless the administrator names them; and with a list only what it names is. Names are not resolved: against one that
leads inside, use the list, or a NetworkPolicy.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

AWS = "https://s3.amazonaws.com"
"""What a left out endpoint counts as."""
ENVIRONMENT = "ALLOW_ENDPOINTS"
"""Variable of controller and node plugin: patterns with commas or blanks between them."""


def listed(text: str) -> tuple[str, ...]:
    """The patterns of ENVIRONMENT."""
    return tuple(text.replace(",", " ").split())


def allowed(endpoint: str, patterns: Sequence[str]) -> bool:
    """Whether a user's choice of an endpoint may be asked. patterns: SCHEME://HOST[:PORT]; HOST may hold `*`."""
    if not patterns:
        return not _link_local(urlsplit(endpoint).hostname or "")
    return any(_matches(endpoint or AWS, pattern) for pattern in patterns)


def _matches(endpoint: str, pattern: str) -> bool:
    asked, wanted = urlsplit(endpoint), urlsplit(pattern)
    same = (asked.scheme, asked.port) == (wanted.scheme, wanted.port)
    return same and fnmatchcase(asked.hostname or "", wanted.hostname or "")


def _link_local(host: str) -> bool:
    try:
        # As clients read them: 2852039166 and 0xa9fea9fe are 169.254.169.254 too.
        return ipaddress.IPv4Address(socket.inet_aton(host)).is_link_local
    except (OSError, ValueError):
        pass
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return False
    return (address.ipv4_mapped or address).is_link_local
