"""Backends whose data the controller does not reach: a claim of another driver, a directory of a node."""

from __future__ import annotations

from collections.abc import Callable

from datastore.api.source import Source
from datastore.api.status import Capabilities
from datastore.backends.base import Ensured, Measured, Owner, Policy, Released


class ElsewhereBackend:
    """Nothing to make, to try or to remove from here: the cluster does it, or nobody. See Backend."""

    def __init__(self, source: Source | None, why: str) -> None:
        self._source = source
        self._why = why

    def ensure(self) -> Ensured:
        """See Backend."""
        return Ensured(source=self._source, owner=Owner.NOBODY)

    def probe(self) -> Capabilities:
        """See Backend. Nothing was tried, so nothing is said."""
        return Capabilities.model_validate({})

    def usage(self) -> Measured | None:
        """See Backend."""
        return None

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """See Backend."""
        return Released(done=True, message=self._why)
