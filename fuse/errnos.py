"""Errors to errno: the one table. Pure, and total: a class not named here takes the number of its nearest base.

Numbers follow errno(3) as an application would meet them on a local disk; only what a program can act upon gets its
own, everything else is EIO and the log says why.
"""

from __future__ import annotations

import errno

from datastore import errors

_EIO = (
    errors.DatastoreError, errors.StoreError, errors.BucketNotFound,  # not ENOENT: who mirrors would delete everything
    errors.WrongRegion, errors.ClockSkew, errors.InvalidRequest, errors.TransientStoreError, errors.Unreachable,
    errors.Throttled, errors.ServerFault, errors.ServerStarting, errors.CorruptBody, errors.MountFailed,
    errors.CacheCorrupt,
)  # fmt: skip
TABLE: dict[type[BaseException], int] = {
    **dict.fromkeys(_EIO, errno.EIO),
    errors.InvalidManifest: errno.EINVAL,
    errors.NotFound: errno.ENOENT,
    errors.AlreadyExists: errno.EEXIST,
    errors.PreconditionFailed: errno.ESTALE,
    errors.AccessDenied: errno.EACCES,
    errors.ObjectLocked: errno.EPERM,  # as of an immutable file: unlink(2), rmdir(2)
    errors.CredentialsInvalid: errno.EACCES,
    errors.EndpointNotAllowed: errno.EACCES,
    errors.HostUntrusted: errno.EACCES,
    errors.InvalidKey: errno.EINVAL,
    errors.KeyTooLong: errno.ENAMETOOLONG,
    errors.KeyConflict: errno.EEXIST,
    errors.MetadataTooLarge: errno.ENOSPC,  # setxattr(2): no room for the attribute
    errors.OutOfSpace: errno.ENOSPC,
    errors.Unsupported: errno.EOPNOTSUPP,
    errors.DeadlineExceeded: errno.ETIMEDOUT,
}


def errno_of(error: BaseException) -> int | None:
    """The number for the application, or None when the error is not one that a file system may raise (a defect)."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return next((TABLE[base] for base in type(error).__mro__ if base in TABLE), None)
