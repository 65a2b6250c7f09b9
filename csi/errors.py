"""The driver's own errors, beside datastore.errors; status.py has the gRPC code of each.

DatastoreError
 |- VolumeBusy       another call works on the volume: ask again
 |- VolumeNotFound   there is no such volume, or it is not where it should be
 |- VolumeConflict   the volume is there, but with other properties than requested
 |- Refused          the present state does not allow it, and a retry won't help until that changes
 |- CommandTimeout   a command was given up, and its processes were killed
 |- NotAnswering     the mount daemon, a supervisor or a mount server does not answer: it is being replaced
 |- DaemonOutdated   the mount daemon is of an earlier release: its pod has to be replaced
 '- Unsent           changes could not be uploaded; they are kept on this node's disk
"""

from __future__ import annotations

import datastore.errors as known
from datastore.controlclient import NotAnswering as NotAnswering
from datastore.errors import DatastoreError, MountFailed


class VolumeBusy(DatastoreError):
    """Another call works on the volume."""


class VolumeNotFound(DatastoreError):
    """There is no such volume, or it is not where it should be."""


class VolumeConflict(DatastoreError):
    """The volume is there, but with other properties than requested."""


class Refused(DatastoreError):
    """The present state does not allow the operation."""


class CommandTimeout(DatastoreError):
    """A command took too long."""


class DaemonOutdated(DatastoreError):
    """The mount daemon is of an earlier release and does not understand the request."""


class Unsent(DatastoreError):
    """Changes could not be uploaded yet; they are on this node's disk."""


_OURS = (VolumeBusy, VolumeNotFound, VolumeConflict, Refused, CommandTimeout, NotAnswering, DaemonOutdated, Unsent)


def error_named(kind: str, text: str) -> DatastoreError:
    """Make the error that another of our processes has reported, from its class's name and its text."""
    ours = {each.__name__: each for each in _OURS}
    return ours[kind](text) if kind in ours else known.error_named(kind, text, MountFailed)
