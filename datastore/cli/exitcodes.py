"""The meaning of the exit codes; docs/reference/cli.md repeats the table, and a test compares the two."""

from __future__ import annotations

from enum import IntEnum

from datastore import errors
from datastore.models.errors import InvalidReference, SourceInvalid
from datastore.mounting.errors import Unsynced


class ExitCode(IntEnum):
    """Exit codes of every verb. A verb that runs a command, such as `run`, returns its code unless that is 0."""

    OK = 0
    ERROR = 1
    USAGE = 2
    ACCESS = 3
    STORAGE = 4
    MOUNT = 5
    UNSYNCED = 6
    RUN_UNSYNCED = 75
    DETACHED = 76
    NOT_EXECUTABLE = 126
    COMMAND_NOT_FOUND = 127
    INTERRUPTED = 130
    TERMINATED = 143


MEANING = {
    ExitCode.OK: "Done.",
    ExitCode.ERROR: "Another failure.",
    ExitCode.USAGE: "Wrong usage or manifest (the text names the field), or a source or target that is refused.",
    ExitCode.ACCESS: "The storage refused the credentials or the access, or the clocks differ too much.",
    ExitCode.STORAGE: "The bucket, region or endpoint does not exist or does not answer, or the storage failed.",
    ExitCode.MOUNT: "The mount failed: kernel, fusermount3, /dev/fuse, or the directory.",
    ExitCode.UNSYNCED: (
        "Changes could not be uploaded; they are kept on disk, and `status` lists them. Over NFS they may be lost,"
        " as the error says."
    ),
    ExitCode.RUN_UNSYNCED: (
        "`run`: the command succeeded, but not every change was uploaded; they are kept on disk."
        " Over NFS they may be lost."
    ),
    ExitCode.DETACHED: "`run`, `mount --foreground`: programs still use the directory; the mount ends with them.",
    ExitCode.NOT_EXECUTABLE: "`run`: the command can't be executed.",
    ExitCode.COMMAND_NOT_FOUND: "`run`: there is no such command.",
    ExitCode.INTERRUPTED: "Interrupted by Ctrl-C; no mount is left behind.",
    ExitCode.TERMINATED: "Ended by SIGTERM; no mount is left behind. In general 128 + the signal's number.",
}

_ACCESS = (errors.CredentialsInvalid, errors.AccessDenied, errors.ClockSkew)


def exit_code_for(error: BaseException) -> ExitCode:
    """Return the exit code of an error. Every error has one."""
    if isinstance(error, errors.InvalidManifest | InvalidReference | SourceInvalid):
        return ExitCode.USAGE
    if isinstance(error, _ACCESS):
        return ExitCode.ACCESS
    if isinstance(error, errors.StoreError):
        return ExitCode.STORAGE
    if isinstance(error, errors.MountFailed):
        return ExitCode.MOUNT
    if isinstance(error, Unsynced):
        return ExitCode.UNSYNCED
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.ERROR
