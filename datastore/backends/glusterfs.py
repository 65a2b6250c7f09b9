"""A GlusterFS volume that exists: nothing is made there, and its servers are asked whether they serve it.

They are asked as a client asks first of all, for the volume's file: ONC RPC (RFC 5531) to port 24007, procedure GETSPEC
of the program "GlusterFS Handshake". That says that the volume exists; whether the bricks answer, a mount finds out.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping

from datastore.api.source import GlusterFSLocation
from datastore.api.status import Capabilities
from datastore.backends.base import Ensured, Measured, Policy, Released
from datastore.errors import NotFound, Unreachable

PORT = 24007
PROGRAM, VERSION, GETSPEC = 14398633, 2, 2
TIMEOUT_S = 3.0
"""For each server."""
MAX_ANSWER_BYTES = 4 << 20
"""A volume's file has some hundred bytes for each brick."""
_CALL, _REPLY, _RPC_VERSION = 0, 1, 2
_LAST_FRAGMENT = 1 << 31
_KNOWN = {b"min-op-version": b"1", b"max-op-version": b"999999"}
"""Which releases' volumes we know: any. A server keeps a newer volume's file from a client that does not say so."""
_HEADER = struct.Struct(">6I")
"""Of an accepted reply: xid, REPLY, accepted, flavour and size of the verifier, how it was accepted."""


def _dictionary(pairs: Mapping[bytes, bytes]) -> bytes:
    """Opaque XDR of GlusterFS's own form: how many; then for each the sizes, the name and its 0, the text and its 0."""
    words = b"".join(
        struct.pack(">2I", len(name), len(text) + 1) + name + b"\0" + text + b"\0" for name, text in pairs.items()
    )
    whole = struct.pack(">I", len(pairs)) + words
    return struct.pack(">I", len(whole)) + whole + bytes(-len(whole) % 4)


_VERSIONS = _dictionary(_KNOWN)


class GlusterFSBackend:
    """See Backend."""

    def __init__(self, location: GlusterFSLocation) -> None:
        self._location = location

    def ensure(self) -> Ensured:
        """See Backend. Errors: NotFound: no such volume; Unreachable: no server that knows answers."""
        find(self._location)
        return Ensured(source=self._location)

    def probe(self) -> Capabilities:
        """See Backend. Nothing was tried, so nothing is said."""
        return Capabilities.model_validate({})

    def usage(self) -> Measured | None:
        """See Backend."""
        return None

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """See Backend."""
        return Released(done=True, message="a volume that was there before stays as it is")


def find(location: GlusterFSLocation, port: int = PORT) -> str:
    """Ask the servers, one after the other, until one knows the volume; that server's name.

    Errors: NotFound when one says that there is no such volume; else Unreachable with what each of them did.
    """
    silent: dict[str, str] = {}
    for server in location.servers:
        try:
            told = _ask(server, port, location.volume)
        except (OSError, struct.error) as error:
            silent[server] = "no answer in time" if isinstance(error, TimeoutError) else _words(error)
            continue
        if told:
            return server
        raise NotFound(f"{server} has no volume {location.volume} that is started (gluster volume info)")
    raise Unreachable(_unreachable(silent, port))


def _unreachable(silent: Mapping[str, str], port: int) -> str:
    told = "; ".join(f"{server}: {why}" for server, why in silent.items())
    return f"no GlusterFS server answers on port {port}: {told}"


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it speaks another protocol"


def _ask(server: str, port: int, volume: str) -> bool:
    """Whether it gives the volume's file. Errors: OSError; struct.error for what is no answer."""
    end = time.monotonic() + TIMEOUT_S
    xid = int.from_bytes(os.urandom(4), "big")
    name = volume.encode()
    padded = struct.pack(">I", len(name)) + name + bytes(-len(name) % 4)
    call = struct.pack(">10I", xid, _CALL, _RPC_VERSION, PROGRAM, VERSION, GETSPEC, 0, 0, 0, 0)
    call += struct.pack(">I", 0) + padded + _VERSIONS  # no flags
    with socket.create_connection((server, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">I", _LAST_FRAGMENT | len(call)) + call)
        answer = _record(connection, end)
    got, kind, accepted, _flavour, verifier, outcome = _HEADER.unpack_from(answer)
    if (got, kind, accepted, verifier, outcome) != (xid, _REPLY, 0, 0, 0):
        raise struct.error("refused")
    result, number = struct.unpack_from(">2i", answer, _HEADER.size)
    if result < 0 and number != errno.ENOENT:
        raise OSError(number, os.strerror(number))
    return int(result) >= 0


def _record(connection: socket.socket, end: float) -> bytes:
    """One record, of fragments as RFC 5531 has them."""
    whole = b""
    while True:
        (mark,) = struct.unpack(">I", _exactly(connection, 4, end))
        size = mark & ~_LAST_FRAGMENT
        if len(whole) + size > MAX_ANSWER_BYTES:
            raise struct.error("too long")
        whole += _exactly(connection, size, end)
        if mark & _LAST_FRAGMENT:
            return whole


def _exactly(connection: socket.socket, size: int, end: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(min(size - len(received), 1 << 16))
        if not part:
            raise ConnectionResetError("it hangs up")
        received += part
    return bytes(received)
