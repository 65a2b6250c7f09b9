"""A TCP connection to a host: the name is looked up once, and what is connected to is one of the addresses found."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

from datastore.errors import EndpointNotAllowed

_Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


def dial(
    host: str,
    port: int,
    limit_s: float,
    *,
    refusal: Callable[[str], str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> socket.socket:
    """Connected within limit_s in all. Each address but the last gets half of what is left.

    refusal: see allowed(). Errors: TimeoutError, socket.gaierror for a name that does not resolve, OSError of the last
    address, EndpointNotAllowed.
    """
    deadline = clock() + limit_s
    addresses = look_up(host, port, limit_s)
    if refusal is not None:
        addresses = allowed(host, addresses, refusal)
    for number, (family, address) in enumerate(addresses, 1):
        left_s = deadline - clock()
        if left_s <= 0:
            raise TimeoutError
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.settimeout(left_s if number == len(addresses) else left_s / 2)
            made.connect(address)
        except OSError:
            made.close()
            if number == len(addresses):
                raise
        else:
            return made
    raise OSError(f"{host} has no address")


def allowed(host: str, addresses: Sequence[_Address], refusal: Callable[[str], str]) -> Sequence[_Address]:
    """Those of a host's addresses that may be connected to. refusal: why an address may not, '': it may.

    Errors: EndpointNotAllowed when none may.
    """
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


def look_up(host: str, port: int, limit_s: float) -> Sequence[_Address]:
    """The addresses of a host in the order in which they should be tried. Errors: TimeoutError, socket.gaierror.

    getaddrinfo(3) can't be interrupted and may wait for a silent name server for a minute: it has a thread of its own.
    """
    try:
        return _found(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    answers: list[Sequence[_Address] | OSError] = []

    def ask() -> None:
        try:
            answers.append(_found(host, port, 0))
        except OSError as error:
            answers.append(error)

    asking = threading.Thread(target=ask, name="look-up", daemon=True)
    asking.start()
    asking.join(limit_s)
    if not answers:
        raise TimeoutError
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]


def _found(host: str, port: int, flags: int) -> Sequence[_Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # a label that is empty or longer than 63 characters
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]
