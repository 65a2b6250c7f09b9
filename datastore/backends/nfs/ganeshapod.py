"""The program in the pod of a Datastore's NFS server: `ganeshapod.py serve`, and `ganeshapod.py probe` for its probes.

It imports nothing but the standard library, since the image (manifests/managed-nfs/Dockerfile) has only this file.
serve() prepares the claim, writes the configuration that the controller made, starts rpcbind (without it Ganesha does
not serve version 3), and becomes Ganesha. probe() requests what a client would: the root of the export, and the
attributes of this root. Sources: RFC 1813, RFC 5531.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

VOLUME = Path("/volume")
DATA, STATE = "data", "ganesha"
"""Directories of the claim: what is exported, and what Ganesha has to know of its clients after a restart."""
PSEUDO = "/data"
"""The export's path for clients."""
NFS_PORT, MOUNT_PORT = 2049, 20048
CONFIGURATION = "GANESHA_CONFIGURATION"
OWNER = "EXPORT_OWNER"
"""Environment variable with uid, gid and mode (octal) of the exported directory when it is made."""
MESSAGE = Path("/dev/termination-log")
RUN = Path("/run/ganesha")
TIMEOUT_S = 4.0
NFS, MOUNT, V3 = 100003, 100005, 3
GETATTR, MNT = 1, 1
DIRECTORY = 2
_CALL, _RPC_VERSION, _AUTH_SYS = 0, 2, 1
_LAST_FRAGMENT = 1 << 31


class Refused(Exception):
    """What serve() or probe() found wrong; the text is one line for people."""


def ready(volume: Path, owner: str) -> None:
    """Make the directories of a new claim. Errors: Refused if DATA is gone, or if the claim can't be served."""
    data, state = volume / DATA, volume / STATE
    if state.is_dir() and not data.is_dir():
        raise Refused(f"the directory {DATA} is gone from the claim; nothing is recreated in its place")
    uid, gid, mode = owner.split()
    if not state.is_dir():
        data.mkdir(exist_ok=True)
        os.chown(data, int(uid), int(gid))
        data.chmod(int(mode, 8))
        if not has_handles(data):
            text = "NFS-Ganesha can't serve this claim: its file system has no file handles"
            raise Refused(f"{text} (NFS, FUSE and overlay have none; ext4 and XFS on a disk have)")
        state.mkdir(mode=0o700)


def mounts(table: str, volume: Path) -> str:
    """Return the one line of a mount table that Ganesha may see, as its /etc/mtab. Pure.

    Ganesha uses the first mount of a file system that it finds. That may be one of the single files that the kubelet
    mounts into every pod: they are on the claim's file system where the claim is a directory of the node.
    """
    found = [line for line in table.splitlines() if line.split()[1] == str(volume)]
    return "".join(f"{line}\n" for line in found[-1:])


def has_handles(directory: Path) -> bool:
    """Return whether the file system has name_to_handle_at(2). Errors: OSError if the container may not call it."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136)
    mount = ctypes.c_int()
    found = libc.name_to_handle_at(-100, os.fsencode(directory), handle, ctypes.byref(mount), 0)
    if found != 0 and ctypes.get_errno() != errno.EOPNOTSUPP:
        raise OSError(ctypes.get_errno(), f"name_to_handle_at: {os.strerror(ctypes.get_errno())}")
    return bool(found == 0)


def serve() -> None:
    """Prepare the claim, and replace this process by Ganesha. Errors: Refused, OSError, CalledProcessError."""
    ready(VOLUME, os.environ[OWNER])
    RUN.mkdir(exist_ok=True)
    (RUN / "mtab").write_text(mounts(Path("/proc/mounts").read_text(), VOLUME))
    configuration = RUN / "ganesha.conf"
    configuration.write_text(os.environ[CONFIGURATION])
    subprocess.run(["rpcbind"], check=True)
    logs = ["-L", "STDERR", "-N", "NIV_EVENT"]
    os.execvp("ganesha.nfsd", ["ganesha.nfsd", "-F", "-f", str(configuration), "-p", str(RUN / "pid"), *logs])  # noqa: S606


def probe(host: str = "127.0.0.1", path: str = PSEUDO, ports: tuple[int, int] = (NFS_PORT, MOUNT_PORT)) -> None:
    """Check that the server shows the export's root. Errors: Refused, OSError if it does not."""
    answer = call(host, ports[1], MOUNT, MNT, opaque(path.encode()))
    (status,) = struct.unpack(">I", answer[:4])
    if status:
        raise Refused(f"the server does not export {path} (MOUNT answers {status})")
    (length,) = struct.unpack(">I", answer[4:8])
    attributes = call(host, ports[0], NFS, GETATTR, opaque(answer[8 : 8 + length]))
    if struct.unpack(">2I", attributes[:8]) != (0, DIRECTORY):
        raise Refused(f"the server does not show the root of {path}")


def opaque(content: bytes) -> bytes:
    """Return bytes as opaque XDR of variable length."""
    return struct.pack(">I", len(content)) + content + bytes(-len(content) % 4)


def call(host: str, port: int, program: int, procedure: int, arguments: bytes) -> bytes:
    """Return the results of one call of version 3, made as root without a machine name. Errors: Refused, OSError."""
    xid = int.from_bytes(os.urandom(4), "big")
    identity = struct.pack(">5I", 0, 0, 0, 0, 0)
    head = struct.pack(">6I", xid, _CALL, _RPC_VERSION, program, V3, procedure)
    message = head + struct.pack(">I", _AUTH_SYS) + opaque(identity) + struct.pack(">2I", 0, 0) + arguments
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">I", _LAST_FRAGMENT | len(message)) + message)
        stream = connection.makefile("rb")
        body, last = b"", 0
        while not last:
            (mark,) = struct.unpack(">I", _exactly(stream.read(4), 4))
            last, length = mark & _LAST_FRAGMENT, mark & (_LAST_FRAGMENT - 1)
            if len(body) + length > 65536:
                raise Refused("what answers is no NFS server")
            body += _exactly(stream.read(length), length)
    # xid, REPLY, MSG_ACCEPTED; the verifier; SUCCESS.
    if len(body) < 24 or struct.unpack(">3I", body[:12]) != (xid, 1, 0):
        raise Refused(f"the server refuses calls of program {program}")
    end = 20 + struct.unpack(">I", body[16:20])[0]
    if body[end : end + 4] != bytes(4):
        raise Refused(f"the server does not serve version {V3} of program {program}")
    return body[end + 4 :]


def _exactly(content: bytes, length: int) -> bytes:
    if len(content) != length:
        raise Refused("the server hangs up")
    return content


def main(argv: list[str]) -> int:
    """Return the exit status: 0 if the probe succeeds, else 1; serve() returns only if it fails."""
    try:
        probe() if argv == ["probe"] else serve()
    except (Refused, OSError, struct.error, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        if argv != ["probe"]:
            MESSAGE.write_text(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
