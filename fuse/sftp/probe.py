"""Whether an SSH server lets us in and shows the directory: what a mount asks first, and all that `doctor` asks."""

from __future__ import annotations

import errno
import os
import stat

from asyncssh import SFTPAttrs, SFTPClient

from datastore.api.source import SFTPLocation
from datastore.errors import AccessDenied, NotFound

from ..ops import FSError
from .connection import Connection

ANSWER_S = 10.0
"""How long probe() waits for an answer after the login."""


def probe(location: SFTPLocation) -> None:
    """Log in and look at the directory, within 30 s. Errors: DatastoreError, the reason why it can't be mounted."""
    connection = Connection(location)
    connection.outage_s = ANSWER_S
    try:
        connection.start(wait=True)
        look(connection)
    finally:
        connection.stop()


def look(connection: Connection) -> None:
    """Look at the directory, and at the one in which the session begins. Errors: StoreError, the reason why it can't be
    mounted."""
    location = connection.location
    path = os.fsencode(location.path)

    async def ask(sftp: SFTPClient, _repeated: bool) -> SFTPAttrs:
        await sftp.stat(b".")
        return await sftp.stat(path)

    try:
        mode = connection.call("lstat", ask).permissions or 0
    except FSError as error:
        if error.errno == errno.EACCES:
            raise AccessDenied(f"the login at {location.host} may not look at {location.path}") from None
        raise NotFound(f"{location.host} has no directory {location.path}: make it there first") from None
    if not stat.S_ISDIR(mode):
        raise NotFound(f"{location.path} at {location.host} is no directory")
