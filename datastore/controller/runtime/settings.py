"""What an administrator chooses for any controller. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Read from the command line in __main__; nothing else reads it."""

    namespaces: tuple[str, ...] = ()
    """Only these and its own; empty: the whole cluster."""
    namespace: str = "datastore-system"
    """The controller's own: its Lease is there."""
    identity: str = "datastore-controller"
    """This replica: the name of its pod."""
    workers: int = 16
    """Objects worked on at once."""
    first_retry_s: float = 2.0
    retry_ceiling_s: float = 30.0
    """A failure is tried again after first_retry_s, doubling up to this, for as long as the object is there."""
    port: int = 8080
    """/livez, /readyz and /metrics; 0: any free port."""

    @property
    def watched_namespaces(self) -> tuple[str, ...]:
        """Those to watch; empty: all. Its own is always among them: its Lease is there."""
        return tuple(dict.fromkeys((*self.namespaces, self.namespace))) if self.namespaces else ()

    def serves(self, namespace: str) -> bool:
        """Whether objects of this namespace are ours."""
        return not self.namespaces or namespace in self.watched_namespaces

    def retry_after(self, failures: int) -> float:
        """Seconds until the next try after so many failures in a row before this one."""
        return min(self.first_retry_s * 2.0 ** min(failures, 16), self.retry_ceiling_s)
