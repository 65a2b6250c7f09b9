"""The kernel's NFS client: whether there is one, its mount options, and whether the server of a mount answers.

Nothing here touches a mount, because a process that does so waits in the kernel while the mount's server is away.

Options: nfs(5). Programs, versions and procedure 0: RFC 1813, RFC 7530, RFC 5531.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
import time
from pathlib import Path

from datastore import mountinfo
from datastore.api.source import NFSLocation

VERSIONS = ("4.2", "4.1", "4.0", "3")
"""The NFS versions, the newest first; they are tried in this order until both ends support one."""
PORT = 2049
FSTYPES = ("nfs", "nfs4")
FILESYSTEMS = Path("/proc/filesystems")
"""Lists the file systems that this kernel has now, without those in modules that are not loaded yet."""
PROGRAM = 100003
PING_TIMEOUT_S = 5.0
"""Long enough for a server whose threads all wait for its disks: if such a server counted as away, a forced unmount
would leave behind what the server has not received."""
_SYS_FSOPEN = 430
"""The number of fsopen(2) on every architecture."""
_LAST_FRAGMENT = 1 << 31
_CALL, _REPLY, _RPC_VERSION = 0, 1, 2


def options(location: NFSLocation, version: str, address: str, *, metadata_ttl_s: float) -> str:
    """Return the data argument of mount(2). The location's own options come last, so that they win. A mount is `hard`
    unless the location says otherwise: programs wait while the server is away, and lose nothing. A change by another
    client is seen after metadata_ttl_s, in whole seconds, and at the next open in any case."""
    family = "tcp6" if ":" in address else "tcp"
    given = [f"vers={version}", f"addr={address}", f"proto={family}", "hard", f"actimeo={int(metadata_ttl_s)}"]
    if version == "3":
        # Locks of version 3 need rpc.statd on the node. With nolock they hold only between the programs of one node.
        given += ["nolock", f"mountaddr={address}", f"mountproto={family}"]
        given += [f"mountport={location.mount_port}"] if location.mount_port else []
    given += [f"port={location.port}"] if location.port else []
    return ",".join([*given, *location.options])


def versions_of(location: NFSLocation) -> tuple[str, ...]:
    """Return the versions to try, in order."""
    chosen = [text for option in location.options for name, _, text in [option.partition("=")] if name in VERSION_NAMES]
    if chosen:
        return (chosen[-1],)
    if location.version == "4":
        return VERSIONS[:-1]
    return (location.version,) if location.version else VERSIONS


VERSION_NAMES = ("vers", "nfsvers")


def device_of(location: NFSLocation) -> str:
    """Return the source of the mount, as the mount table shows it: server:path."""
    server = f"[{location.server}]" if ":" in location.server else location.server
    return f"{server}:{location.path}"


def is_of_this_machine(address: str) -> bool:
    """Return whether an address is a loopback, link-local, unspecified or multicast address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast


def ping(address: str, port: int, version: str, timeout_s: float = PING_TIMEOUT_S) -> str:
    """Return why the NFS server does not answer, or ''. It gets a call of the null procedure, over a new connection."""
    end = time.monotonic() + timeout_s
    xid = int.from_bytes(os.urandom(4), "big")
    number = int(version.partition(".")[0])
    call = struct.pack(">10I", xid, _CALL, _RPC_VERSION, PROGRAM, number, 0, 0, 0, 0, 0)
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.sendall(struct.pack(">I", _LAST_FRAGMENT | len(call)) + call)
            answer = b""
            while len(answer) < 12:
                connection.settimeout(max(0.01, end - time.monotonic()))
                part = connection.recv(512)
                if not part:
                    return f"the NFS server {address} hangs up"
                answer += part
    except TimeoutError:
        return f"the NFS server {address} does not answer on port {port} within {timeout_s:.0f} s"
    except OSError as error:
        return f"the NFS server {address} does not answer on port {port} ({error.strerror or error})"
    same = struct.unpack(">2I", answer[4:12]) == (xid, _REPLY)
    return "" if same else f"what answers at {address}, port {port}, is no NFS server"


def silent(mount: mountinfo.Mount) -> str:
    """Return why the server of a mount does not answer, or ''."""
    return ping(option(mount, "addr"), int(option(mount, "port") or PORT), option(mount, "vers") or "4")


def option(mount: mountinfo.Mount, name: str) -> str:
    """Return the value of a mount's option in the mount table, or ''."""
    return next((text for key, _, text in (each.partition("=") for each in mount.options) if key == name), "")


def in_this_kernel() -> bool:
    """Return whether the kernel has an NFS client now; a module that is not loaded yet does not count."""
    try:
        return "nfs" in FILESYSTEMS.read_text().split()
    except OSError:
        return False


def loaded() -> bool:
    """Have the kernel load its NFS module if it has one; return whether it has an NFS client. Only for root.

    fsopen(2) does this, and mounts nothing. The call waits for modprobe(8).
    """
    if not sys.platform.startswith("linux"):
        return False
    descriptor = ctypes.CDLL(None).syscall(_SYS_FSOPEN, b"nfs", 1)
    if descriptor >= 0:
        os.close(descriptor)
    return bool(descriptor >= 0)


if __name__ == "__main__":
    sys.exit(0 if loaded() else 1)
