"""`python -m datastore.nfsmount`: one mount(2) of an NFS export, in a process that may be left behind when it hangs.

It reads request() from standard input and writes {"version": "4.2", "address": ""} or {"error": line, "kind": class}.
The module imports little.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

from datastore.api.source import NFSLocation, document_of, source_from
from datastore.errors import (
    AccessDenied,
    DatastoreError,
    InvalidManifest,
    MountFailed,
    NotFound,
    Unreachable,
    Unsupported,
    error_named,
)
from datastore.nfsclient import PORT, device_of, is_of_this_machine, options, ping, versions_of

if TYPE_CHECKING:
    from datastore.api.mountspec import MountSpec

COMMAND = (sys.executable, "-m", "datastore.nfsmount")
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
"""Flags of mount(2), from linux/mount.h."""
ANSWER_TIMEOUT_S = 5.0
_NO_EXPORT = "the NFS server has no such export for this machine: the path is wrong, or its list of clients lacks it"


def request(spec: MountSpec, *, from_here: bool) -> str:
    """Return the input of COMMAND. from_here: whether the server may be this machine, as on a laptop but on no node."""
    return json.dumps(
        {
            "source": document_of(spec.source),
            "mountpoint": spec.mountpoint,
            "readOnly": spec.read_only,
            "metadataTTL": spec.metadata_ttl_s,
            "fromHere": from_here,
        }
    )


def version_in(output: str | bytes) -> str:
    """Return the NFS version of the new mount, from the output of COMMAND. Errors: the DatastoreError in it."""
    answer = json.loads(output)
    if "error" in answer:
        raise error_named(answer["kind"], answer["error"], MountFailed)
    return str(answer["version"])


def mount(
    location: NFSLocation, mountpoint: str, *, read_only: bool, metadata_ttl_s: float, from_here: bool = False
) -> tuple[str, str]:
    """Mount an export; return the NFS version and the server's address. Errors: DatastoreError."""
    address = _address(location)
    if is_of_this_machine(address) and not from_here:
        raise AccessDenied(
            f"{location.server} is {address}, an address of the node itself: nothing is mounted from there"
        )
    last = ""
    for version in versions_of(location):
        _ping(location, address, version)
        data = options(location, version, address, metadata_ttl_s=metadata_ttl_s)
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
        code = _mount(device_of(location), mountpoint, flags, data)
        if code == 0:
            return version, address
        if code != errno.EPROTONOSUPPORT:
            raise _error(code, location, address, data)
        last = version
    raise Unsupported(f"{location}: the server, or this machine's kernel, does not know NFS version {last}")


def reach(location: NFSLocation) -> None:
    """Ask the server whether it answers, as mount() does first. Errors: Unreachable."""
    _ping(location, _address(location), versions_of(location)[0])


def _ping(location: NFSLocation, address: str, version: str) -> None:
    """Ask the server first: the kernel would wait for minutes for one that is away, and not say why. Errors:
    Unreachable."""
    asked = version != "3" or location.port
    if asked and (trouble := ping(address, location.port or PORT, version, ANSWER_TIMEOUT_S)):
        raise Unreachable(trouble)


def _address(location: NFSLocation) -> str:
    try:
        found = socket.getaddrinfo(location.server, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"the NFS server {location.server} is not found: {error.strerror or error}") from None
    return str(found[0][4][0])


def _mount(device: str, mountpoint: str, flags: int, data: str) -> int:
    """Call mount(2); return its errno, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (os.fsencode(device), os.fsencode(mountpoint), b"nfs", ctypes.c_ulong(flags), data.encode())
    return 0 if libc.mount(*arguments) == 0 else ctypes.get_errno()


def _error(code: int, location: NFSLocation, address: str, data: str) -> DatastoreError:
    where = f"{location} ({address})"
    match code:
        # A client that is not on the server's list gets an error of either of the next two groups.
        case errno.EACCES | errno.EPERM:
            return AccessDenied(f"{where}: {_NO_EXPORT}")
        case errno.ENOENT | errno.ENOTDIR:
            return NotFound(f"{where}: {_NO_EXPORT}")
        case errno.EINVAL:
            return InvalidManifest(f"{where}: the kernel's NFS client does not take these options together: {data}")
        case errno.ENODEV:
            return Unsupported(f"{where}: this machine's kernel has no NFS client")
        case errno.ETIMEDOUT | errno.ECONNREFUSED | errno.EHOSTUNREACH | errno.ENETUNREACH | errno.ECONNRESET:
            return Unreachable(f"{where}: the NFS server does not answer: {os.strerror(code)}")
    return MountFailed(f"{where}: the kernel refuses the mount: {os.strerror(code)}")


def main() -> int:
    """Run the process. The exit code is 0 after a DatastoreError too, because the answer reports it."""
    asked = json.load(sys.stdin)
    try:
        location = source_from(asked["source"])
        assert isinstance(location, NFSLocation)
        version, address = mount(
            location,
            asked["mountpoint"],
            read_only=asked["readOnly"],
            metadata_ttl_s=asked["metadataTTL"],
            from_here=asked["fromHere"],
        )
    except DatastoreError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    else:
        answer = {"version": version, "address": address}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
