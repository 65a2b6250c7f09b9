"""The backend of an existing GlusterFS volume: it makes nothing, but asks the servers whether they serve the volume.

As each client does first, it requests the volume's volfile: ONC RPC (RFC 5531) to port 24007, procedure GETSPEC of the
program "GlusterFS Handshake". The answer shows that the volume exists, and names its bricks. Their hosts are then
asked for the ports of the bricks (PORTBYBRICK of "Gluster Portmap"): a stopped volume has none. Only a mount shows
whether the bricks answer.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import time
from collections.abc import Mapping

from datastore.api.source import GlusterFSLocation
from datastore.backends.base import Ensured
from datastore.backends.elsewhere import ElsewhereBackend
from datastore.errors import NotFound, Unreachable

PORT = 24007
_GETSPEC = (14398633, 2, 2)
_PORT_BY_BRICK = (34123456, 1, 1)
"""Program, version and procedure."""
TIMEOUT_S = 3.0
"""How long each server may take to answer."""
MAX_ANSWER_BYTES = 4 << 20
"""The longest answer that is accepted; a volfile has some hundred bytes for each brick."""
_CALL, _REPLY, _RPC_VERSION = 0, 1, 2
_LAST_FRAGMENT = 1 << 31
_KNOWN = {b"min-op-version": b"1", b"max-op-version": b"999999"}
"""The client claims to know all releases: a server refuses the volfile of a newer volume than the client knows."""
_OPTION = re.compile(r"^ *option (remote-host|remote-subvolume) (\S+)$", re.MULTILINE)
"""The host or the path of a brick in its part of a volfile."""
_HEADER = struct.Struct(">6I")
"""Head of an accepted reply: xid, REPLY, MSG_ACCEPTED, flavour and size of the verifier, accept_stat (RFC 5531)."""


def _dictionary(pairs: Mapping[bytes, bytes]) -> bytes:
    """Return a dictionary as opaque XDR in GlusterFS's form: number of pairs; of each the sizes, name, 0, text, 0."""
    words = b"".join(
        struct.pack(">2I", len(name), len(text) + 1) + name + b"\0" + text + b"\0" for name, text in pairs.items()
    )
    whole = struct.pack(">I", len(pairs)) + words
    return struct.pack(">I", len(whole)) + whole + bytes(-len(whole) % 4)


_VERSIONS = _dictionary(_KNOWN)


class GlusterFSBackend(ElsewhereBackend):
    """See Backend."""

    def __init__(self, location: GlusterFSLocation) -> None:
        super().__init__(location, "a volume that was there before stays as it is")
        self._location = location

    def ensure(self) -> Ensured:
        """See Backend. Errors: NotFound when the volume is not there or stopped; Unreachable when no server answers."""
        find(self._location)
        return super().ensure()


def find(location: GlusterFSLocation, port: int = PORT) -> str:
    """Ask the servers for the volume, one after the other, until one answers; return the name of this server.

    Errors: NotFound when it answers that there is no such volume, or none of its bricks runs; Unreachable, with the
    failures, when none answers.
    """
    silent: dict[str, str] = {}
    for server in location.servers:
        try:
            volfile = _volfile(server, port, location.volume)
        except (OSError, struct.error) as error:
            silent[server] = "no answer in time" if isinstance(error, TimeoutError) else _words(error)
            continue
        if volfile is None:
            raise NotFound(f"{server} has no volume {location.volume} (gluster volume info)")
        if not _runs(volfile, port):
            raise NotFound(
                f"{server} has the volume {location.volume}, but none of its bricks runs (gluster volume start"
                f" {location.volume}; gluster volume status {location.volume})"
            )
        return server
    raise Unreachable(_unreachable(silent, port))


def _runs(volfile: str, port: int) -> bool:
    """Return whether a brick of the volume may run. The hosts of the bricks are asked until one runs; a host that does
    not answer may have one."""
    parts = [dict(_OPTION.findall(part)) for part in volfile.split("end-volume")]
    bricks = [each for each in parts if len(each) == 2]
    for each in bricks:
        try:
            if _brick_port(each["remote-host"], port, each["remote-subvolume"]):
                return True
        except (OSError, struct.error):
            return True
    return not bricks


def _unreachable(silent: Mapping[str, str], port: int) -> str:
    told = "; ".join(f"{server}: {why}" for server, why in silent.items())
    return f"no GlusterFS server answers on port {port}: {told}"


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it speaks another protocol"


def _volfile(server: str, port: int, volume: str) -> str | None:
    """Return what a client needs to know of the volume; None if there is no such volume. Errors: as _call()."""
    answer = _call(server, port, _GETSPEC, struct.pack(">I", 0) + _opaque(volume.encode()) + _VERSIONS)  # no flags
    result, number, size = struct.unpack_from(">2iI", answer)
    if result >= 0:
        return answer[12 : 12 + size].decode(errors="replace")
    if number != errno.ENOENT:
        raise OSError(number, os.strerror(number))
    return None


def _brick_port(host: str, port: int, brick: str) -> int:
    """Return the port of the process that serves a brick, 0 if it does not run. Errors: as _call()."""
    result, _, _, found = struct.unpack_from(">4i", _call(host, port, _PORT_BY_BRICK, _opaque(brick.encode())))
    return int(found) if result >= 0 else 0


def _opaque(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content + bytes(-len(content) % 4)


def _call(server: str, port: int, procedure: tuple[int, int, int], arguments: bytes) -> bytes:
    """Return the result of a remote procedure. Errors: OSError; struct.error for an answer in another protocol."""
    end = time.monotonic() + TIMEOUT_S
    xid = int.from_bytes(os.urandom(4), "big")
    call = struct.pack(">10I", xid, _CALL, _RPC_VERSION, *procedure, 0, 0, 0, 0) + arguments
    with socket.create_connection((server, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">I", _LAST_FRAGMENT | len(call)) + call)
        answer = _record(connection, end)
    got, kind, accepted, _flavour, verifier, outcome = _HEADER.unpack_from(answer)
    if (got, kind, accepted, verifier, outcome) != (xid, _REPLY, 0, 0, 0):
        raise struct.error("refused")
    return answer[_HEADER.size :]


def _record(connection: socket.socket, end: float) -> bytes:
    """Receive one record, which consists of fragments (RFC 5531)."""
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
