"""What an administrator chooses for any controller. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Read from the command line in __main__; nothing else reads it."""

    namespaces: tuple[str, ...] = ()
    """The namespaces to serve, with the controller's own; empty: the whole cluster."""
    namespace: str = "datastore-system"
    """The controller's own namespace, where its Lease is."""
    identity: str = "datastore-controller"
    """The name of this replica: that of its pod."""
    workers: int = 16
    """How many objects of each queue are worked on at once."""
    first_retry_s: float = 2.0
    retry_ceiling_s: float = 30.0
    """A failure is retried after first_retry_s, then after twice as long up to this, while the object exists."""
    port: int = 8080
    """The port of /livez, /readyz and /metrics; 0: any free port."""

    @property
    def watched_namespaces(self) -> tuple[str, ...]:
        """The namespaces to watch, among them the controller's own, where its Lease is; empty: all."""
        return tuple(dict.fromkeys((*self.namespaces, self.namespace))) if self.namespaces else ()

    def serves(self, namespace: str) -> bool:
        """Whether this controller serves objects of this namespace."""
        return not self.namespaces or namespace in self.watched_namespaces

    def retry_after(self, failures: int) -> float:
        """Return seconds until the next try. failures: how many tries in a row failed before the last one."""
        return min(self.first_retry_s * 2.0 ** min(failures, 16), self.retry_ceiling_s)
