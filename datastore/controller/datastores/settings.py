"""What an administrator chooses for the controller of Datastores. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from datastore.api.endpoints import EndpointPolicy
from datastore.controller.runtime.settings import RuntimeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RuntimeSettings):
    """Read from the command line in __main__. Secrets of StorageClasses may be in the controller's own namespace."""

    check_s: float = 300.0
    """How often the storage of a Datastore that works is checked again."""
    usage_s: float = 900.0
    """How often a large Datastore is counted; one that fits a page of a listing is counted at every check."""
    release_s: float = 20.0
    """How long one call may remove or move data; then other Datastores have their turn."""
    abandon_s: float = 60.0
    """In a namespace that is being deleted, how long a failing removal is tried before the data is left behind."""
    local_paths: frozenset[str] = field(default_factory=frozenset)
    """Directories of nodes that a Datastore may name: exactly these, since below them a link could lead anywhere."""
    ambient_credentials: bool = False
    """Whether a Datastore without a Secret may use the identity of the controller and of the nodes."""
    watch_secrets: bool = False
    """Whether changed Secrets are noticed at once and their pods annotated; the kubelet alone takes 60 to 90 s."""
    policy: EndpointPolicy = field(default_factory=EndpointPolicy)
    """Which servers users may name in a spec, and which addresses may be connected to. See api/endpoints.py."""
    probe_claims: bool = False
    """Whether pods may be created that test another driver's volumes, for Datastores that request it."""
    probe_image: str = ""
    """The image of these pods; empty: that of the controller's own pod."""
