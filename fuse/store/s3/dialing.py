"""Connects a socket to a host, through a proxy and TLS if need be. The host's name is looked up once, and only the
addresses found are connected to."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from datastore.errors import DeadlineExceeded, EndpointNotAllowed, InvalidRequest, Unreachable
from datastore.tls import judged_alike

from ...loop import in_time, now
from .errors import connection_words, one_line
from .http1 import Connection, Incoming, NotHttp
from .tls import TlsSocket

_Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; authorization is the value of the Proxy-Authorization header or ''."""

    host: str
    port: int
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Where to connect to, and how. refusal: returns why an address may not be connected to; '': it may."""

    host: str
    port: int
    secure: bool
    proxy: Proxy | None = None
    refusal: Callable[[str], str] | None = None

    def __str__(self) -> str:
        """Return the route for a message."""
        scheme = "https" if self.secure else "http"
        via = f" through proxy {self.proxy.host}:{self.proxy.port}" if self.proxy else ""
        return f"{scheme}://{self.host}:{self.port}{via}"


@lru_cache(maxsize=16)
def trust(ca_bundle: str = "") -> ssl.SSLContext:
    """Return a TLS context that trusts the system's roots, and those of `ca_bundle` (PEM). Errors: InvalidRequest.
    Shared, since the system's roots take 0.8 MiB in each context, and a controller has many clients."""
    context = judged_alike(ssl.create_default_context())
    try:
        if ca_bundle:
            context.load_verify_locations(cadata=ca_bundle)
    except (ssl.SSLError, ValueError) as error:
        text = "caBundle, or ca.crt of the Secret, holds no PEM certificate that can be read"
        raise InvalidRequest(f"{text}: {one_line(str(error))}") from error
    return context


def proxy_for(host: str, *, secure: bool) -> Proxy | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name for a host. Errors: InvalidRequest."""
    url = getproxies().get("https" if secure else "http", "")
    if not url or proxy_bypass(host):
        return None
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError as error:
        raise InvalidRequest("the proxy in HTTP_PROXY or HTTPS_PROXY is not a URL") from error
    if parts.scheme != "http" or not parts.hostname:
        raise InvalidRequest("the proxy in HTTP_PROXY or HTTPS_PROXY must be an http:// URL")
    authorization = ""
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(login.encode()).decode()
    return Proxy(parts.hostname, port, authorization)


def connected(
    route: Route, tls: ssl.SSLContext | None, limit_s: float, clock: Callable[[], float] = time.monotonic
) -> socket.socket | TlsSocket:
    """Return a socket connected within limit_s, over TLS if the route is secure. Errors: Unreachable, DeadlineExceeded,
    EndpointNotAllowed."""
    until = clock() + limit_s

    def left_s() -> float:
        if (left := until - clock()) <= 0:
            raise TimeoutError
        return left

    made: socket.socket | None = None
    try:
        proxy, refusal = route.proxy, route.refusal
        if proxy is None:
            made = _dial(route.host, route.port, left_s, refusal)
        else:
            # The administrator's proxy looks the host up itself; the addresses that are found here are checked, too.
            with suppress(socket.gaierror, TimeoutError):
                if refusal is not None:
                    _allowed(route.host, _look_up(route.host, route.port, limit_s / 2), refusal)
            made = _dial(proxy.host, proxy.port, left_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if route.secure:
            if proxy:
                now(_tunnel(Connection(made), route, proxy, left_s))
            return TlsSocket(made, tls or trust(), route.host.rstrip("."), left_s)
        return made
    except BaseException as error:
        if made is not None:
            made.close()
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{route}: no connection within {limit_s:.0f} s") from error
        if isinstance(error, NotHttp | OSError):
            variable = ("HTTPS_PROXY" if route.secure else "HTTP_PROXY") if route.proxy else ""
            raise Unreachable(f"{route}: {connection_words(error, variable)}") from error
        raise


async def _tunnel(connection: Connection, route: Route, proxy: Proxy, pace: Callable[[], float]) -> None:
    """Send CONNECT to the proxy (RFC 9110, section 9.3.6). Errors: TimeoutError, OSError, NotHttp."""
    name = f"[{route.host}]" if ":" in route.host else route.host
    lines = [f"CONNECT {name}:{route.port} HTTP/1.1", f"Host: {name}:{route.port}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    await connection.send("\r\n".join([*lines, "", ""]).encode(), pace)
    incoming = Incoming(connection, pace)
    await incoming.head()
    if incoming.status != 200 or not incoming.is_taken:
        raise NotHttp(f"the proxy refuses with status {incoming.status}")


def _dial(
    host: str, port: int, left_s: Callable[[], float], refusal: Callable[[str], str] | None = None
) -> socket.socket:
    """Return a socket connected within the time left; each address but the last gets half of what is left then.

    refusal: see _allowed(). Errors: TimeoutError, socket.gaierror for a name that does not resolve, OSError of the last
    address, EndpointNotAllowed.
    """
    addresses = _look_up(host, port, left_s())
    if refusal is not None:
        addresses = _allowed(host, addresses, refusal)
    for number, (family, address) in enumerate(addresses, 1):
        is_last = number == len(addresses)
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.settimeout(left_s() if is_last else left_s() / 2)
            made.connect(address)
            return made
        except OSError:
            made.close()
            if is_last:
                raise
    raise OSError(f"{host} has no address")


def _allowed(host: str, addresses: Sequence[_Address], refusal: Callable[[str], str]) -> Sequence[_Address]:
    """Return the addresses of a host that may be connected to. refusal: returns why an address may not; '': it may.
    Errors: EndpointNotAllowed when none of them may."""
    whys = [refusal(address[0]) for _, address in addresses]
    found = [each for each, why in zip(addresses, whys, strict=True) if not why]
    if not found and addresses:
        first = addresses[0][1][0]
        where = host if host == first else f"{host} leads to {first}, which"
        raise EndpointNotAllowed(
            f"spec.s3.endpoint: {where} is {whys[0]}; an administrator of the cluster may allow it"
            f" (ALLOW_RANGES={first.partition('%')[0]})"
        )
    return found


def _look_up(host: str, port: int, limit_s: float) -> Sequence[_Address]:
    """Return a host's addresses in the order in which they should be tried. Errors: TimeoutError, socket.gaierror.

    getaddrinfo(3) can't be interrupted and may wait for a silent name server for a minute: it runs in its own thread.
    """
    with suppress(socket.gaierror):
        return _found(host, port, socket.AI_NUMERICHOST)
    return in_time(partial(_found, host, port, 0), limit_s, "look-up")


def _found(host: str, port: int, flags: int) -> Sequence[_Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # a label that is empty or longer than 63 characters
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]
