"""What an administrator chooses for the controller. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Read from the command line in __main__; nothing else reads it."""

    namespaces: tuple[str, ...] = ()
    """Only these and its own; empty: the whole cluster."""
    namespace: str = "datastore-system"
    """The controller's own: its heartbeat is there, and the Secrets of StorageClasses."""
    identity: str = "datastore-controller"
    """This replica, for people: the name of its pod."""
    peering: str = ""
    """Name of the ClusterKopfPeering (KopfPeering with `namespaces`) that the replicas share; empty: one replica."""
    priority: int = 0
    """Among the replicas the one with the highest works, the others wait."""
    workers: int = 16
    """Objects worked on at once, and threads that may wait for storage."""
    check_s: float = 300.0
    """How often the storage behind a Datastore that works is looked at again."""
    first_retry_s: float = 2.0
    retry_ceiling_s: float = 30.0
    """A failure is tried again after first_retry_s, doubling up to this, for as long as the Datastore is there."""
    usage_s: float = 900.0
    """How often a large Datastore is counted; one that fits a page of a listing is counted at every check."""
    release_s: float = 20.0
    """How long one call may remove or move data; then others have their turn."""
    abandon_s: float = 60.0
    """In a namespace that is being deleted, how long a failing removal is tried before the data is left behind."""
    local_paths: frozenset[str] = field(default_factory=frozenset)
    """Directories of nodes that a Datastore may name; exactly these: below them, a link could lead anywhere."""
    ambient_credentials: bool = False
    """Whether a Datastore without a Secret may use the identity of the controller and of the nodes."""
    watch_secrets: bool = False
    """See changes of Secrets at once, and tell the pods that use them; the kubelet's own pace is 60 to 90 s."""
    endpoints: tuple[str, ...] = ()
    """Patterns of the endpoints that users may name; empty: all but link-local addresses. See api/endpoints.py."""
    probe_claims: bool = False
    """Whether pods may be made that try what a volume of another driver can do, for Datastores that ask for it."""
    probe_image: str = ""
    """Their image; empty: that of the controller's own pod."""
    port: int = 8080
    """/livez, /readyz and /metrics; 0: any free port."""
    heartbeat_s: float = 15.0
    """How often the heartbeat is written; the watch must show it within three of these."""

    @property
    def watched_namespaces(self) -> tuple[str, ...]:
        """Those to watch; empty: all. Its own is always among them: the echo of the heartbeat comes from there."""
        return tuple(dict.fromkeys((*self.namespaces, self.namespace))) if self.namespaces else ()

    def serves(self, namespace: str) -> bool:
        """Whether Datastores of this namespace are ours."""
        return not self.namespaces or namespace in self.watched_namespaces
