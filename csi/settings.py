"""Settings of the processes, from their environment; read in __main__ only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from datastore.api import endpoints
from datastore.api.volumecontext import DRIVER, memory_of
from datastore.errors import InvalidManifest

DEFAULT_PLUGIN_DIR = f"/var/lib/kubelet/plugins/{DRIVER}"
DEFAULT_MEMORY = "512Mi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """plugin_dir: ours on the node, the same path in both pods and on the node; private to root.

    node_id: the Node's name. registry_dir: where the kubelet looks for plugins; None: don't register. endpoint: where
    CSI is spoken. memory_bytes: ceiling of a mount server, for volumes that have none of their own. http_port:
    liveness, readiness and metrics; 0: none. max_volumes: what the node says it can take; each costs some memory.
    endpoints: patterns of those that inline volumes may name; empty: all but link-local addresses.
    """

    node_id: str
    plugin_dir: Path = field(default_factory=lambda: Path(DEFAULT_PLUGIN_DIR))
    registry_dir: Path | None = None
    endpoint: Path | None = None
    memory_bytes: int = 512 << 20
    http_port: int = 0
    max_volumes: int = 0
    endpoints: tuple[str, ...] = ()

    @property
    def csi_socket(self) -> Path:
        """Where the kubelet speaks CSI with us."""
        return self.endpoint or self.plugin_dir / "csi.sock"

    @property
    def keeper_socket(self) -> Path:
        """Where the keeper's host listens."""
        return self.plugin_dir / "keeper.sock"

    @property
    def holder_socket(self) -> Path:
        """Where the plugin gives descriptors to a host that starts anew."""
        return self.plugin_dir / "holder.sock"

    @property
    def state_root(self) -> Path:
        """Holds one directory for each volume: journal, staging files, log."""
        return self.plugin_dir / "state"

    @property
    def cache_dir(self) -> Path:
        """Shared by all volumes of the node."""
        return self.plugin_dir / "cache"

    @property
    def inline_root(self) -> Path:
        """Where inline volumes are mounted before they are shown to their pod."""
        return self.plugin_dir / "inline"


def from_environment(environment: Mapping[str, str]) -> Settings:
    """By NODE_NAME, PLUGIN_DIR, REGISTRY_DIR, CSI_ENDPOINT, MOUNT_MEMORY, HTTP_PORT, MAX_VOLUMES, ALLOW_ENDPOINTS.

    Errors: InvalidManifest.
    """
    endpoint = environment.get("CSI_ENDPOINT", "").removeprefix("unix://")
    registry = environment.get("REGISTRY_DIR", "")
    try:
        return Settings(
            node_id=environment.get("NODE_NAME", ""),
            plugin_dir=Path(environment.get("PLUGIN_DIR") or DEFAULT_PLUGIN_DIR),
            registry_dir=Path(registry) if registry else None,
            endpoint=Path(endpoint) if endpoint else None,
            memory_bytes=memory_of(environment.get("MOUNT_MEMORY") or DEFAULT_MEMORY),
            http_port=int(environment.get("HTTP_PORT") or 0),
            max_volumes=int(environment.get("MAX_VOLUMES") or 0),
            endpoints=endpoints.listed(environment.get(endpoints.ENVIRONMENT, "")),
        )
    except ValueError as error:
        raise InvalidManifest(f"the environment of the driver is wrong: {error}") from error
