"""The contract of a backend: ensure, probe, usage, release. All idempotent, blocking, and bounded by deadlines.

A backend is bound to one Datastore's data. Whoever calls runs it outside the event loop. Errors are
datastore.errors.DatastoreError; nothing here retries: the reconcile loop does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from datastore.api.status import Capabilities


class Owner(Enum):
    """For whom the data was made, as the ownership marker says."""

    THIS = "this Datastore"
    OTHER = "another Datastore"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The Datastore that data is made for; the uid tells it from an earlier one of the same name."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How much is stored."""

    objects: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """The place exists and can be used. measured: known when the look cost no more than it had to."""

    owner: Owner = Owner.NOBODY
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a call of release did. done False: there is more, call again. message: for people."""

    done: bool
    message: str


class Policy(Enum):
    """What becomes of the data of a deleted Datastore."""

    RETAIN = "Retain"
    DELETE = "Delete"
    ARCHIVE = "Archive"


class Backend(Protocol):
    """One Datastore's data."""

    def ensure(self) -> Ensured:
        """Make the place if the manifest asks for it, and look at it. Repeated: the same answer."""
        ...

    def probe(self) -> Capabilities:
        """What a directory here can do, tried on the backend itself; None where it was not tried."""
        ...

    def usage(self) -> Measured | None:
        """How much is stored; None when that can't be known within bounds."""
        ...

    def release(self, policy: Policy, deadline_s: float) -> Released:
        """Give the data up by the policy, for at most about deadline_s. Only what carries this Datastore's marker goes.

        Repeated: goes on where it ended, and succeeds when nothing is left.
        """
        ...
