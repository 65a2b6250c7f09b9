"""The interface of a backend: the place in the storage behind one Datastore. registry.py has the kinds of backends.

Every method is idempotent, blocks until its deadline at most, and may not be called on an event loop. Errors are
datastore.errors.DatastoreError, except those of Cluster; nothing here retries, since the reconcile loop does.
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
    """The Datastore for which the data was made, according to the ownership marker."""

    THIS = "this Datastore"
    OTHER = "another Datastore"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The Datastore for which data is made; the uid distinguishes it from an earlier Datastore of the same name."""

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
    """The result of ensure(): the place exists and can be used. source: what a mount shows; None: we don't mount it.

    measured: None unless ensure() found out how much is stored without another request.
    """

    source: Source | None
    owner: Owner = Owner.NOBODY
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The result of release(). done False: something is left to do, so call again. message: for people."""

    done: bool
    message: str


class Policy(Enum):
    """What happens to the data of a deleted Datastore."""

    RETAIN = "Retain"
    DELETE = "Delete"
    ARCHIVE = "Archive"


class Cluster(Protocol):
    """The cluster's objects, for backends that consist of them. Methods block, and nothing is retried.

    namespace: of the controller and the nodes' mount daemons.
    Errors: AccessDenied without the right, NotFound without the namespace, InvalidRequest for a body that the server
    refuses and for an object of another owner, Throttled, ServerFault, DeadlineExceeded. Without an answer, or when
    this process may no longer write, an exception is raised that is no DatastoreError: a backend does not catch it.
    """

    namespace: str

    def get(self, kind: Resource, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return an object, or None if it does not exist."""
        ...

    def apply(self, body: Mapping[str, Any], uid: str) -> Mapping[str, Any]:
        """Create or change an object of the Datastore with this uid; return the object as it is afterwards."""
        ...

    def delete(self, kind: Resource, namespace: str, name: str, uid: str) -> bool:
        """Delete an object of the Datastore with this uid, and no other; return False once there is none."""
        ...


class Backend(Protocol):
    """The data of one Datastore."""

    def ensure(self) -> Ensured:
        """Make the place as the spec demands, and check it. A repeated call gives the same answer.

        If the storage has quotas, or lists of allowed clients, the capacity and the clients are set too.
        """
        ...

    def probe(self) -> Capabilities:
        """Return the capabilities of a directory, tested on the backend itself; a field is None if not tested."""
        ...

    def usage(self) -> Measured | None:
        """Return how much is stored; None when that can't be found out within the backend's bounds."""
        ...

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """Retain, delete or archive the data, as the policy says. Data without this Datastore's marker is not touched.

        go_on: called before each step; when it returns False, release() returns with done False. A repeated call
        continues there, and succeeds when nothing is left.
        """
        ...
