"""Checks of whether a Datastore's NFS export, or its directory of an SSH server, can be mounted from here.

They ask with the code of a mount, so that they say what the mount would say, and write nothing.
"""

from __future__ import annotations

import logging

from datastore import nfsmount
from datastore.api.source import NFSLocation, SFTPLocation
from datastore.cli.exitcodes import exit_code_for
from datastore.cli.findings import Finding, bad, ok, warn
from datastore.errors import DatastoreError, MountFailed
from datastore.fuse.nfs.client import FIRST_CONNECTION_S, Client
from datastore.mounting import kernelnfs

# What the code of a mount logs is for the mount's log; here the finding says it.
logging.getLogger().addHandler(logging.NullHandler())

_NFS_ADVICE = "correct spec.nfs, or the exports of the server"
_SFTP_ADVICE = "correct spec.sftp and its Secret, or set up what is missing on the server"


def nfs_check(name: str, location: NFSLocation) -> Finding:
    """Ask an NFS server for an export. Root's mount may be the kernel's, which tries version 4 first: that is not asked
    for the export, but its server has to answer."""
    by_kernel = kernelnfs.is_used()
    try:
        if by_kernel:
            nfsmount.reach(location)
        client = Client(location)
    except MountFailed as error:  # libnfs is not installed
        if by_kernel:
            return warn(name, f"{location} is not asked: {error}", "mount it to find out: the kernel needs no libnfs")
        return bad(name, str(error), "install libnfs", exit_code_for(error))
    except DatastoreError as error:
        return bad(name, str(error), _NFS_ADVICE, exit_code_for(error))
    try:
        client.start(FIRST_CONNECTION_S)
    except DatastoreError as error:
        if by_kernel:
            return warn(name, f"NFS version 3: {error}", "mount it to find out: the kernel tries version 4 first")
        return bad(name, str(error), _NFS_ADVICE, exit_code_for(error))
    finally:
        client.stop()
    return ok(name, f"{location}: the server answers and lets this machine mount it")


def sftp_check(name: str, location: SFTPLocation) -> Finding:
    """Log in to an SSH server and look at the directory."""
    # Not imported at the top: the SSH library is slow to load, and is needed only here.
    from datastore.fuse.sftp.probe import probe

    try:
        probe(location)
    except DatastoreError as error:
        return bad(name, str(error), _SFTP_ADVICE, exit_code_for(error))
    return ok(name, f"{location}: host key and login are right, the directory is there")
