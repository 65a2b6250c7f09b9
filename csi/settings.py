"""The settings of the driver's processes, from environment variables; only the __main__ modules read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from datastore.api.endpoints import EndpointPolicy, policy_from
from datastore.api.mountspec import DEFAULT_MEMORY_BYTES
from datastore.api.volumecontext import DRIVER, memory_of
from datastore.errors import InvalidManifest
from datastore.units import parse_quantity

DEFAULT_PLUGIN_DIR = f"/var/lib/kubelet/plugins/{DRIVER}"
DEFAULT_CACHE_VOLUME = "50Gi"
DEFAULT_CACHE_NODE = "100Gi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """plugin_dir: the driver's directory, at the same path in both pods and on the node; private to root.

    node_id: the Node's name. registry_dir: where the kubelet looks for plugins; None: don't register. endpoint: the CSI
    socket; None: in plugin_dir. memory_bytes: limit of a mount server, for volumes without a limit of their own.
    http_port: for liveness, readiness and metrics; 0: none. max_volumes: how many volumes the node says it can take,
    because each needs memory; 0: Kubernetes decides. policy: which servers a tenant's volume may use, see
    api/endpoints.py. cache_volume_bytes: the largest cache of one volume, whatever its manifest says; cache_node_bytes:
    of all volumes together (cacheshares.py). pod_logs_dir: the kubelet's directory of containers' logs. host_proc,
    host_cgroups: the host's /proc and /sys/fs/cgroup.
    """

    node_id: str
    plugin_dir: Path = field(default_factory=lambda: Path(DEFAULT_PLUGIN_DIR))
    registry_dir: Path | None = None
    endpoint: Path | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    http_port: int = 0
    max_volumes: int = 0
    cache_volume_bytes: int = parse_quantity(DEFAULT_CACHE_VOLUME)
    cache_node_bytes: int = parse_quantity(DEFAULT_CACHE_NODE)
    policy: EndpointPolicy = field(default_factory=EndpointPolicy)
    pod_logs_dir: Path = Path("/var/log/pods")
    host_proc: Path = Path("/host/proc")
    host_cgroups: Path = Path("/host/cgroup")

    @property
    def pods_dir(self) -> Path:
        """The kubelet's directory of pods, beside its directory of plugins."""
        return self.plugin_dir.parent.parent / "pods"

    @property
    def notes_dir(self) -> Path:
        """The directory with a small file for each pod whose log is copied."""
        return self.plugin_dir / "pod-logs"

    @property
    def csi_socket(self) -> Path:
        """The socket on which the plugin serves CSI."""
        return self.endpoint or self.plugin_dir / "csi.sock"

    @property
    def daemon_socket(self) -> Path:
        """The socket on which the mount daemon listens."""
        return self.plugin_dir / "mount-daemon.sock"

    @property
    def handles_socket(self) -> Path:
        """The socket on which the plugin gives its handles to a restarted mount daemon."""
        return self.plugin_dir / "handles.sock"

    @property
    def state_root(self) -> Path:
        """The directory with a directory for each volume: its journal, staging files and log."""
        return self.plugin_dir / "state"

    @property
    def cache_dir(self) -> Path:
        """The directory with a directory for each volume: its read cache."""
        return self.plugin_dir / "cache"

    @property
    def inline_root(self) -> Path:
        """The directory in which inline volumes are mounted before they are bind-mounted for their pod."""
        return self.plugin_dir / "inline"


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read NODE_NAME, PLUGIN_DIR, REGISTRY_DIR, CSI_ENDPOINT, MOUNT_MEMORY, HTTP_PORT, MAX_VOLUMES, ALLOW_ENDPOINTS,
    ALLOW_RANGES, DENY_RANGES, CACHE_SIZE_VOLUME and CACHE_SIZE_NODE. Errors: InvalidManifest."""
    endpoint = environment.get("CSI_ENDPOINT", "").removeprefix("unix://")
    memory = environment.get("MOUNT_MEMORY")
    registry = environment.get("REGISTRY_DIR", "")
    try:
        return Settings(
            node_id=environment.get("NODE_NAME", ""),
            plugin_dir=Path(environment.get("PLUGIN_DIR") or DEFAULT_PLUGIN_DIR),
            registry_dir=Path(registry) if registry else None,
            endpoint=Path(endpoint) if endpoint else None,
            memory_bytes=memory_of(memory) if memory else DEFAULT_MEMORY_BYTES,
            http_port=int(environment.get("HTTP_PORT") or 0),
            max_volumes=int(environment.get("MAX_VOLUMES") or 0),
            cache_volume_bytes=parse_quantity(environment.get("CACHE_SIZE_VOLUME") or DEFAULT_CACHE_VOLUME),
            cache_node_bytes=parse_quantity(environment.get("CACHE_SIZE_NODE") or DEFAULT_CACHE_NODE),
            policy=policy_from(environment),
        )
    except ValueError as error:
        raise InvalidManifest(f"the environment of the driver is wrong: {error}") from error
