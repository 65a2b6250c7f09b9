"""The backend of data that the controller leaves alone: a claim, a node's directory, an NFS export that exists."""

from __future__ import annotations

from collections.abc import Callable

from datastore.api.source import Source
from datastore.api.status import Capabilities
from datastore.backends.base import Ensured, Measured, Owner, Policy, Released


class ElsewhereBackend:
    """Makes, probes and removes nothing: the cluster does it, or nobody. See Backend. why: the message of release()."""

    def __init__(self, source: Source | None, why: str) -> None:
        self._source = source
        self._why = why

    def ensure(self) -> Ensured:
        """See Backend."""
        return Ensured(source=self._source, owner=Owner.NOBODY)

    def probe(self) -> Capabilities:
        """See Backend. Nothing is tried."""
        return Capabilities.model_validate({})

    def usage(self) -> Measured | None:
        """See Backend."""
        return None

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """See Backend."""
        return Released(done=True, message=self._why)
