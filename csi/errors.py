"""What can go wrong in the driver beside datastore.errors; status.py gives each its gRPC code.

DatastoreError
 |- VolumeBusy       another call works on the volume: ask again
 |- VolumeNotFound   no such volume, or not where it should be
 |- VolumeConflict   it is there, but not as asked for
 |- Refused          the state of things forbids it, and asking again won't help
 |- CommandTimeout   a command was given up; its processes are ended
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
    """No such volume."""


class VolumeConflict(DatastoreError):
    """The volume is there, but not as asked for."""


class Refused(DatastoreError):
    """Not in this state of things."""


class CommandTimeout(DatastoreError):
    """A command took too long."""


class DaemonOutdated(DatastoreError):
    """The mount daemon does not know what is asked of it."""


class Unsent(DatastoreError):
    """Changes are not in the storage yet."""


_OURS = (VolumeBusy, VolumeNotFound, VolumeConflict, Refused, CommandTimeout, NotAnswering, DaemonOutdated, Unsent)


def error_named(kind: str, text: str) -> DatastoreError:
    """The error that another of our processes reported by the name of its class."""
    ours = {each.__name__: each for each in _OURS}
    return ours[kind](text) if kind in ours else known.error_named(kind, text, MountFailed)
