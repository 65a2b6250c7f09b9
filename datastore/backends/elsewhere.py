"""Backends whose data the controller does not reach: a claim of another driver, a directory of a node."""

from __future__ import annotations

from datastore.api.status import Capabilities
from datastore.backends.base import Ensured, Measured, Owner, Policy, Released


class ElsewhereBackend:
    """Nothing to make, to try or to remove from here: the cluster does it, or nobody. See Backend."""

    def __init__(self, kept: str) -> None:
        self._kept = kept

    def ensure(self) -> Ensured:
        """See Backend."""
        return Ensured(owner=Owner.NOBODY)

    def probe(self) -> Capabilities:
        """See Backend. Nothing was tried, so nothing is said."""
        return Capabilities.model_validate({})

    def usage(self) -> Measured | None:
        """See Backend."""
        return None

    def release(self, policy: Policy, deadline_s: float) -> Released:
        """See Backend."""
        return Released(done=True, message=self._kept)
