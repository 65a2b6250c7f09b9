"""Errors to errno: the one table. Pure, and total: a class not named here takes the number of its nearest base.

Numbers follow errno(3) as an application would meet them on a local disk; only what a program can act upon gets its
own, everything else is EIO and the log says why.
"""

from __future__ import annotations

import errno

from datastore import errors

TABLE: dict[type[BaseException], int] = {
    errors.DatastoreError: errno.EIO,
    errors.InvalidManifest: errno.EINVAL,
    errors.StoreError: errno.EIO,
    errors.NotFound: errno.ENOENT,
    errors.BucketNotFound: errno.EIO,  # not ENOENT: a tool that mirrors deletions would delete everything
    errors.AlreadyExists: errno.EEXIST,
    errors.PreconditionFailed: errno.ESTALE,
    errors.AccessDenied: errno.EACCES,
    errors.ObjectLocked: errno.EPERM,  # as of an immutable file: unlink(2), rmdir(2)
    errors.CredentialsInvalid: errno.EACCES,
    errors.EndpointNotAllowed: errno.EACCES,
    errors.HostUntrusted: errno.EACCES,
    errors.WrongRegion: errno.EIO,
    errors.ClockSkew: errno.EIO,
    errors.InvalidKey: errno.EINVAL,
    errors.KeyTooLong: errno.ENAMETOOLONG,
    errors.KeyConflict: errno.EEXIST,
    errors.InvalidRequest: errno.EIO,
    errors.MetadataTooLarge: errno.ENOSPC,  # setxattr(2): no room for the attribute
    errors.OutOfSpace: errno.ENOSPC,
    errors.Unsupported: errno.EOPNOTSUPP,
    errors.TransientStoreError: errno.EIO,
    errors.Unreachable: errno.EIO,
    errors.DeadlineExceeded: errno.ETIMEDOUT,
    errors.Throttled: errno.EIO,
    errors.ServerFault: errno.EIO,
    errors.ServerStarting: errno.EIO,
    errors.CorruptBody: errno.EIO,
    errors.MountFailed: errno.EIO,
    errors.CacheCorrupt: errno.EIO,
}


def errno_of(error: BaseException) -> int | None:
    """The number for the application, or None when the error is not one that a file system may raise (a defect)."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    for base in type(error).__mro__:
        number = TABLE.get(base)
        if number is not None:
            return number
    return None
