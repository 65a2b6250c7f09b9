"""Mounts by our own engine; the node's mount daemon runs a supervisor and a mount server for each.

INVARIANT: from the time when this process asked for a mount or found it at its start, until the unmount, `handles` has
copies of the mount's descriptors; a restarted mount daemon gets them from here. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from datastore import controlclient, mountinfo
from datastore.api.mountspec import MountSpec
from datastore.api.names import PODS_OF
from datastore.errors import DatastoreError

from .cacheshares import CacheShares
from .errors import DaemonOutdated, NotAnswering, VolumeBusy
from .handle import HandleTable
from .locks import VolumeLocks
from .mountdaemon.protocol import DaemonClient, handles_of
from .mounter import INODES, LARGEST_BYTES, MountedVolume, Stats
from .settings import Settings
from .textformat import Sample

STATUS_TIMEOUT_S = 2.0
TROUBLE_LENGTH = 500
ENGINES = {
    "nfs": "our engine over libnfs",
    "sftp": "our engine over SSH",
    "glusterfs": "GlusterFS's own client, which our mount daemon runs",
}
"""How a volume is mounted, in words, by the kind of its source; for other kinds it is our engine over FUSE."""


class FuseMounter:
    """See mounter.Mounter."""

    def __init__(self, settings: Settings, locks: VolumeLocks) -> None:
        """locks: the volumes' locks. adopt() and share_caches() take them; for other changes the caller holds them."""
        self.handles = HandleTable()
        self._settings = settings
        self._locks = locks
        self._daemon = DaemonClient(settings.daemon_socket, settings.node_id)
        self._shares = CacheShares(settings)

    def ping(self) -> None:
        """Errors: NotAnswering when the mount daemon does not answer."""
        self._daemon.ping()

    def adopt(self) -> None:
        """Take copies of the mount daemon's handles, for the next daemon. Errors: NotAnswering."""
        for handle in handles_of(self._settings.daemon_socket):
            try:
                with self._locks.hold(handle.volume_id):
                    if mountinfo.read().at(handle.spec.mountpoint) is not None:
                        self.handles.put(handle)
                        continue
            except VolumeBusy:  # the call that holds the lock sets the handle
                pass
            handle.close()

    def volumes(self) -> list[str]:
        """See Mounter."""
        return self.handles.volumes()

    def get(self, volume_id: str) -> MountedVolume | None:
        """See Mounter."""
        return self.handles.get(volume_id)

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> None:
        """See Mounter. The volume's cache is limited to its share of the node's cache space."""
        share_bytes = self._shares.admit(volume_id, spec.cache_size_bytes)
        try:
            self._mount(volume_id, replace(spec, cache_size_bytes=share_bytes), ephemeral=ephemeral)
        except DatastoreError:
            if self.handles.get(volume_id) is None:
                self._shares.leave(volume_id, for_good=False)
            raise

    def _mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> None:
        Path(spec.cache_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.handles.put(self._daemon.mount(volume_id, spec, ephemeral=ephemeral))
        except DaemonOutdated as error:
            raise DaemonOutdated(_outdated(self._settings.node_id, error)) from None

    def renew(self, volume_id: str, spec: MountSpec) -> None:
        """See Mounter."""
        handle = self.handles.get(volume_id)
        if handle is not None and mountinfo.read().at(handle.spec.mountpoint) is not None:
            self.mount(volume_id, spec, ephemeral=handle.ephemeral)

    def unmount(self, volume_id: str, mountpoint: str, *, force: bool) -> None:
        """See Mounter. Errors: Unsent, NotAnswering."""
        handle = self.handles.get(volume_id)
        self._daemon.unmount(volume_id, mountpoint, force=force)
        self.handles.drop(volume_id)
        self._shares.leave(volume_id, for_good=handle is not None and handle.ephemeral)

    def resize(self, volume_id: str, size_bytes: int) -> None:
        """See Mounter. A volume without a capacity, which is shown as unlimited, is left as it is."""
        handle = self.handles.get(volume_id)
        mounted = handle is not None and mountinfo.read().at(handle.spec.mountpoint) is not None
        if handle is not None and mounted and 0 < handle.spec.capacity_bytes < size_bytes:
            self._mount(volume_id, replace(handle.spec, capacity_bytes=size_bytes), ephemeral=handle.ephemeral)

    def share_caches(self) -> None:
        """Give each volume its share of the node's cache space; a volume that is busy gets it the next time."""
        handles = {each: handle for each in self.volumes() if (handle := self.handles.get(each)) is not None}
        sizes = {each: handle.spec.cache_size_bytes for each, handle in handles.items()}
        for volume_id, size_bytes in self._shares.round(sizes):
            with suppress(DatastoreError), self._locks.hold(volume_id):
                handle = self.handles.get(volume_id)
                if handle is not None and mountinfo.read().at(handle.spec.mountpoint) is not None:
                    changed = replace(handle.spec, cache_size_bytes=size_bytes)
                    self._mount(volume_id, changed, ephemeral=handle.ephemeral)
                    self._shares.give(volume_id, size_bytes)

    def stats(self, volume_id: str) -> Stats:
        """See Mounter. This asks the mount's server over its control socket, and never touches the mount."""
        handle = self.handles.get(volume_id)
        if handle is None:
            return Stats(0, 0, 0, 0, "", "it is not mounted")
        spec = handle.spec
        total = spec.capacity_bytes or LARGEST_BYTES
        how = f"mounted by {ENGINES.get(spec.source.kind, 'our engine over FUSE')}"
        shown = Stats(total, spec.used_bytes or 0, INODES, spec.used_files or 0, how)
        try:
            answer = controlclient.brief_status(Path(spec.state_dir), STATUS_TIMEOUT_S)
        except NotAnswering as error:
            return shown._replace(trouble=f"{error}; it is being replaced")
        return shown._replace(trouble=_trouble(answer))

    def metrics(self) -> list[Sample]:
        """Return nothing: the mount daemon serves the metrics of its mounts."""
        return []


def _outdated(node: str, error: DaemonOutdated) -> str:
    """Say what to do about a mount daemon that is older than the node plugin (docs/OPERATIONS.md, "Upgrade")."""
    return (
        f"the mount daemon of node {node} is older than its node plugin ({error}). Delete its pod, and programs on that"
        f" node pause for seconds: kubectl delete pod -A -l {PODS_OF}mount-daemon --field-selector spec.nodeName={node}"
    )


def _trouble(answer: Mapping[str, Any]) -> str:
    """Say in words what is wrong according to a server's status, or ''."""
    if answer.get("ok") is not True:
        return "the mount server reports no status"
    unsent = answer.get("unsent")
    if not isinstance(unsent, dict) or not unsent.get("failed"):
        return ""
    return f"{unsent['failed']} files could not be uploaded yet: {unsent.get('error')}"[:TROUBLE_LENGTH]
