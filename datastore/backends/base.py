"""The contract of a backend: the place in the storage behind one Datastore. registry.py knows the kinds there are.

Every method is idempotent, blocks, and is bounded by deadlines; whoever calls runs it outside the event loop. Errors
are datastore.errors.DatastoreError; nothing here retries: the reconcile loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from datastore.api.resources import Resource
from datastore.api.source import Source
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
    """The place exists and can be used.

    source: what a mount of it shows; None: nothing of ours mounts it. measured: known when the look cost no more than
    it had to.
    """

    source: Source | None
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


class Cluster(Protocol):
    """Objects of the cluster, for backends that are made of them. Blocks; nothing is tried again.

    namespace: of the controller, where the nodes' mount daemons are too.
    Errors: AccessDenied without the right, NotFound without the namespace, InvalidRequest for what the API server does
    not take and for an object of somebody else's, Unreachable, DeadlineExceeded.
    """

    namespace: str

    def get(self, kind: Resource, namespace: str, name: str) -> Mapping[str, Any] | None:
        """An object; None when it is not there."""
        ...

    def apply(self, body: Mapping[str, Any], uid: str) -> Mapping[str, Any]:
        """Make the object of the Datastore with this uid, or bring it to what the body says; as it is afterwards."""
        ...

    def delete(self, kind: Resource, namespace: str, name: str, uid: str) -> bool:
        """Ask for its removal; whether some of it is still there. One of somebody else's is not touched."""
        ...


class Backend(Protocol):
    """One Datastore's data."""

    def ensure(self) -> Ensured:
        """Make the place as it is asked for, and look at it. Repeated: the same answer.

        Where the storage has limits and asks who its clients are, that includes the capacity and the clients.
        """
        ...

    def probe(self) -> Capabilities:
        """What a directory here can do, tried on the backend itself; None where it was not tried."""
        ...

    def usage(self) -> Measured | None:
        """How much is stored; None when that can't be known within bounds."""
        ...

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """Give the data up by the policy. Only what carries this Datastore's marker goes.

        go_on: asked before each step; False ends the call, with done False. Repeated: goes on where it ended, and
        succeeds when nothing is left.
        """
        ...
