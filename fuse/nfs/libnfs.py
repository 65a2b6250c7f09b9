"""The raw RPC interface of libnfs by ctypes, as far as NFS version 3 and the MOUNT protocol need it, without policy.

The structures are those that rpcgen makes from RFC 1813 (nfsc/libnfs-raw-nfs.h, libnfs-raw-mount.h), with a C
compiler's alignment; they are the same in libnfs 4.0 and 5.0. A function of `blocking` releases the GIL while it runs;
a function of `quick` keeps it, because it works in memory only.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache

from datastore.errors import MountFailed

LIBRARIES = ("libnfs.so.13", "libnfs.so.14", "libnfs.13.dylib", "libnfs.14.dylib")
"""The file names of libnfs 4.0 (13: Debian 12, Ubuntu 22.04 and 24.04) and 5.0 (14: Debian 13)."""
STATUS_SUCCESS = 0
NFS_PROGRAM, MOUNT_PROGRAM, VERSION = 100003, 100005, 3

Callback = CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_void_p)
"""Its arguments: RPC context, status, result (an error text if the call failed), and the request's private data."""


def _structure(called: str, /, **members: type) -> type[Structure]:
    """Make a C struct with these members in this order."""
    return type(called, (Structure,), {"_fields_": list(members.items())})


class Handle(Structure):
    """nfs_fh3, a file handle, as it is sent."""

    _fields_ = (("length", c_uint32), ("bytes", c_char_p))

    @classmethod
    def of(cls, handle: bytes) -> Handle:
        """Return a structure for these bytes, which it keeps alive."""
        return cls(len(handle), handle)


class ReceivedHandle(Structure):
    """nfs_fh3 as it arrives: an address, because a c_char_p would end at the first zero byte."""

    _fields_ = (("length", c_uint32), ("address", c_void_p))


Where = _structure("Where", directory=Handle, name=c_char_p)
Time = _structure("Time", seconds=c_uint32, nanoseconds=c_uint32)
Attributes = _structure(
    "Attributes",
    type=c_int32, mode=c_uint32, nlink=c_uint32, uid=c_uint32, gid=c_uint32, size=c_uint64, used=c_uint64,
    major=c_uint32, minor=c_uint32, fsid=c_uint64, fileid=c_uint64, atime=Time, mtime=Time, ctime=Time,
)  # fmt: skip
Known = _structure("Known", follows=c_uint32, attributes=Attributes)
"""post_op_attr of RFC 1813."""
Before = _structure("Before", follows=c_uint32, size=c_uint64, mtime=Time, ctime=Time)
"""pre_op_attr of RFC 1813."""
Changed = _structure("Changed", before=Before, after=Known)
"""wcc_data of RFC 1813."""
Made = _structure("Made", follows=c_uint32, handle=ReceivedHandle)
"""post_op_fh3 of RFC 1813."""
SetNumber = _structure("SetNumber", wanted=c_uint32, value=c_uint32)
SetSize = _structure("SetSize", wanted=c_uint32, value=c_uint64)
SetTime = _structure("SetTime", how=c_int32, value=Time)
NewAttributes = _structure(
    "NewAttributes", mode=SetNumber, uid=SetNumber, gid=SetNumber, size=SetSize, atime=SetTime, mtime=SetTime
)
"""sattr3 of RFC 1813."""

ObjectArgs = _structure("ObjectArgs", object=Handle)
"""The arguments of GETATTR, READLINK, FSSTAT and FSINFO."""
WhereArgs = _structure("WhereArgs", where=Where)
"""The arguments of LOOKUP, REMOVE and RMDIR."""
AccessArgs = _structure("AccessArgs", object=Handle, access=c_uint32)
SetAttrArgs = _structure("SetAttrArgs", object=Handle, attributes=NewAttributes, guarded=c_uint32, guard=Time)
ReadArgs = _structure("ReadArgs", file=Handle, offset=c_uint64, count=c_uint32)
WriteArgs = _structure(
    "WriteArgs", file=Handle, offset=c_uint64, count=c_uint32, stable=c_int32, length=c_uint32, bytes=c_char_p
)
CommitArgs = ReadArgs
CreateArgs = _structure("CreateArgs", where=Where, how=c_int32, attributes=NewAttributes)
MkdirArgs = _structure("MkdirArgs", where=Where, attributes=NewAttributes)
SymlinkArgs = _structure("SymlinkArgs", where=Where, attributes=NewAttributes, target=c_char_p)
MknodArgs = _structure("MknodArgs", where=Where, type=c_int32, attributes=NewAttributes, major=c_uint32, minor=c_uint32)
RenameArgs = _structure("RenameArgs", old=Where, new=Where)
LinkArgs = _structure("LinkArgs", file=Handle, new=Where)
ReadDirArgs = _structure(
    "ReadDirArgs",
    directory=Handle, cookie=c_uint64, verifier=c_uint64, name_bytes=c_uint32, bytes=c_uint32,
)  # fmt: skip

Status = _structure("Status", status=c_int32)
"""The beginning of every result; the other fields of a result are valid only if the status is 0."""
GetAttrResult = _structure("GetAttrResult", status=c_int32, attributes=Attributes)
LookupResult = _structure("LookupResult", status=c_int32, object=ReceivedHandle, known=Known)
AccessResult = _structure("AccessResult", status=c_int32, known=Known, access=c_uint32)
ChangedResult = _structure("ChangedResult", status=c_int32, changed=Changed)
"""The result of SETATTR, REMOVE and RMDIR; that of RENAME begins with it."""
ReadLinkResult = _structure("ReadLinkResult", status=c_int32, known=Known, target=c_char_p)
ReadResult = _structure(
    "ReadResult", status=c_int32, known=Known, count=c_uint32, eof=c_uint32, length=c_uint32, address=c_void_p
)
WriteResult = _structure(
    "WriteResult", status=c_int32, changed=Changed, count=c_uint32, committed=c_int32, verifier=c_uint64
)
CommitResult = _structure("CommitResult", status=c_int32, changed=Changed, verifier=c_uint64)
MadeResult = _structure("MadeResult", status=c_int32, made=Made, known=Known)
"""The result of CREATE, MKDIR, SYMLINK and MKNOD."""
LinkResult = _structure("LinkResult", status=c_int32, known=Known)
FsStatResult = _structure(
    "FsStatResult",
    status=c_int32, known=Known, bytes=c_uint64, bytes_free=c_uint64, bytes_available=c_uint64, files=c_uint64,
    files_free=c_uint64, files_available=c_uint64,
)  # fmt: skip
FsInfoResult = _structure(
    "FsInfoResult",
    status=c_int32, known=Known, read_max=c_uint32, read_preferred=c_uint32, read_multiple=c_uint32,
    write_max=c_uint32, write_preferred=c_uint32, write_multiple=c_uint32, directory_preferred=c_uint32,
)  # fmt: skip
ReadDirResult = _structure(
    "ReadDirResult", status=c_int32, known=Known, verifier=c_uint64, first=c_void_p, eof=c_uint32
)
Line = _structure("Line", fileid=c_uint64, name=c_char_p, cookie=c_uint64, known=Known, made=Made, next=c_void_p)
"""entryplus3 of RFC 1813, an entry of READDIRPLUS."""
Flavors = _structure("Flavors", length=c_uint32, address=c_void_p)
MountResult = _structure("MountResult", status=c_int32, root=ReceivedHandle, flavors=Flavors)
"""flavors: the kinds of credentials that the export takes, each a c_int32."""

PROCEDURES = (
    "getattr", "setattr", "lookup", "access", "readlink", "read", "write", "create", "mkdir", "symlink", "mknod",
    "remove", "rmdir", "rename", "link", "readdirplus", "fsstat", "fsinfo", "commit",
)  # fmt: skip


class Library:
    """The functions of libnfs that are used, with their C types."""

    def __init__(self, name: str) -> None:
        quick, blocking = ctypes.PyDLL(name), ctypes.CDLL(name)
        start, text = (Callback, c_void_p), c_char_p
        self.init = _typed(quick.rpc_init_context, c_void_p)
        self.destroy = _typed(blocking.rpc_destroy_context, None, c_void_p)
        self.connect_port = _typed(blocking.rpc_connect_port_async, c_int, c_void_p, text, c_int, c_int, c_int, *start)
        self.connect_program = _typed(blocking.rpc_connect_program_async, c_int, c_void_p, text, c_int, c_int, *start)
        self.service = _typed(blocking.rpc_service, c_int, c_void_p, c_int)
        self.fd = _typed(quick.rpc_get_fd, c_int, c_void_p)
        self.events = _typed(quick.rpc_which_events, c_int, c_void_p)
        self.error = _typed(quick.rpc_get_error, text, c_void_p)
        self.set_auth = _typed(quick.rpc_set_auth, None, c_void_p, c_void_p)
        self.make_auth = _typed(
            quick.libnfs_authunix_create, c_void_p, text, c_uint32, c_uint32, c_uint32, POINTER(c_uint32)
        )
        self.mount = _typed(quick.rpc_mount3_mnt_async, c_int, c_void_p, Callback, text, c_void_p)
        self.nfs = {
            each: _typed(getattr(quick, f"rpc_nfs3_{each}_async"), c_int, c_void_p, Callback, c_void_p, c_void_p)
            for each in PROCEDURES
        }
        self.name = name


def _typed(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function.restype, function.argtypes = result, arguments
    return function


@cache
def library() -> Library:
    """Load libnfs, once. Errors: MountFailed when libnfs is not installed, or only in another version."""
    for name in LIBRARIES:
        try:
            return Library(name)
        except OSError:
            continue
    raise MountFailed(
        "without NFS in the kernel, or without root, an NFS export is mounted by libnfs, which is not installed:"
        " apt-get install libnfs13 (Debian 12, Ubuntu) or libnfs14 (Debian 13)"
    )
