"""The table that maps datastore.errors to errno. A class that is not in the table has the number of its nearest base.

The numbers are those of errno(3) that an application would get on a local disk. Only errors that a program can act upon
have a number of their own; all others are EIO, and the log says why. Pure.
"""

from __future__ import annotations

import errno

from datastore import errors

TABLE: dict[type[BaseException], int] = {
    errors.DatastoreError: errno.EIO,  # BucketNotFound among them: with ENOENT a mirror tool would delete all
    errors.InvalidManifest: errno.EINVAL,
    errors.NotFound: errno.ENOENT,
    errors.AlreadyExists: errno.EEXIST,
    errors.PreconditionFailed: errno.ESTALE,
    errors.AccessDenied: errno.EACCES,
    errors.ObjectLocked: errno.EPERM,  # as for an immutable file: unlink(2), rmdir(2)
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
    """Return the errno for the application; None for an exception that a file system must not raise (a defect)."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return next((TABLE[base] for base in type(error).__mro__ if base in TABLE), None)
