"""The work of the node service, without gRPC: blocking calls, one at a time per volume, each with a deadline.

A volume is mounted once per node, at its staging path, by one of the mounters (mounter.py); pods see bind mounts of it.
Every call is idempotent: it compares the mount table with the request and does what is missing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from datastore import mountinfo
from datastore.api import volumecontext
from datastore.api.mountspec import MountSpec
from datastore.errors import InvalidManifest, Unreachable
from datastore.logs import fields

from . import plan
from .cluster import Cluster
from .commands import Commands, make_directory, remove_directory
from .datastores import FRESH_S, Datastores
from .errors import Refused, Unsent, VolumeNotFound
from .fusemounter import FuseMounter
from .kernelmounter import KernelMounter
from .locks import VolumeLocks
from .mounter import MountedVolume, Mounter, Stats
from .podlogs import PodLogs
from .podusage import PodUsage
from .request import POD_NAMESPACE, Access, Wanted, check_endpoint, key_of, mount_spec
from .settings import Settings

log = logging.getLogger(__name__)

GIVE_UP_S = 600.0
"""How long uploads are retried when a volume leaves the node; then it is unmounted, and the rest stays on disk."""
BUSY_S = 10.0
"""How long a call of the kubelet waits for another call, or for our own work on the volume, before it is refused: the
kubelet shows a refusal to the pod's user as a warning."""
COUNTED = 100_000
"""The most files of a volume that left_files() counts: a hacked server may have made any number."""


class Volumes:
    """All volumes of this node, for the plugin. cluster: None outside a cluster."""

    def __init__(
        self, settings: Settings, cluster: Cluster | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        locks = VolumeLocks()
        self.commands = Commands()
        self.fuse = FuseMounter(settings, locks)
        self.kernel = KernelMounter(settings, self.commands)
        self.pod_logs = PodLogs(settings.pods_dir, settings.pod_logs_dir, settings.notes_dir)
        self.pod_usage = _pod_usage(settings, cluster)
        self._settings = settings
        self._cluster = cluster
        self._datastores = Datastores(cluster, settings.plugin_dir / "settings", clock)
        self._clock = clock
        self._locks = locks
        self._failing_since: dict[str, float] = {}

    def mounted(self) -> list[MountedVolume]:
        """Return the volumes that are mounted on this node, as far as the plugin knows."""
        found = [mounter.get(volume_id) for mounter in self._mounters for volume_id in mounter.volumes()]
        return [each for each in found if each is not None]

    def left_files(self) -> dict[str, int]:
        """Return how many files of volumes that have left this node are not uploaded, by volume id, or by the name of
        the state directory if that is not known (an inline volume's)."""
        here = {key_of(each.volume_id) for each in self.mounted()}
        found: dict[str, int] = {}
        for staging in self._settings.state_root.glob("*/staging"):
            key = staging.parent.name
            if key not in here:
                with suppress(OSError), os.scandir(staging) as files:
                    if count := sum(1 for _ in islice(files, COUNTED)):
                        found[self._datastores.volume_of(key) or key] = count
        return found

    def stage(self, wanted: Wanted) -> None:
        """Mount the volume at its staging path, or bring a mount that is there up to date."""
        with self._locks.hold(wanted.volume_id, BUSY_S):
            self._mount(wanted, wanted.staging_path, fresh=True)

    def publish(self, wanted: Wanted) -> None:
        """Bind-mount the volume at the target path. The kubelet repeats the call every minute or so, with the present
        Secret."""
        with self._locks.hold(wanted.volume_id, BUSY_S):
            source = self._inline(wanted.volume_id) if wanted.ephemeral else wanted.staging_path
            read_only = wanted.read_only or wanted.access.read_only
            resolved = self._resolved(wanted)
            if resolved is not None:
                spec = self._mount(resolved, source)
                # A volume that is read-only now stays writable for a pod that has it mounted writable.
                shown = mountinfo.read().at(wanted.target_path)
                read_only |= spec.read_only and (shown is None or shown.read_only)
            make_directory(wanted.target_path)
            for step in plan.publish(mountinfo.read(), source, wanted.target_path, read_only=read_only):
                self._take(step)

    def unpublish(self, volume_id: str, target: str) -> None:
        """Unmount the target, and an inline volume with it. Do nothing for what is unknown or gone."""
        if self.pod_usage is not None:
            self.pod_usage.finish(target)
        self.pod_logs.finish(target)
        with self._locks.hold(volume_id, BUSY_S):
            self.commands.unmount_all(target)
            remove_directory(target)
            inline = self._inline(volume_id)
            if os.path.isdir(os.path.dirname(inline)):
                self._unmount(volume_id, inline)
                remove_directory(inline)
                remove_directory(os.path.dirname(inline))

    def unstage(self, volume_id: str, staging: str) -> None:
        """Upload what is left and unmount. Do nothing for a volume that is unknown or gone."""
        with self._locks.hold(volume_id, BUSY_S):
            self._unmount(volume_id, staging)

    def expand(self, volume_id: str, path: str, size_bytes: int) -> int:
        """Show the volume larger, unless its server reports the size; return the size. Errors: VolumeNotFound."""
        with self._locks.hold(volume_id, BUSY_S):
            mounter = self._mounter_of(volume_id)
            mounted = mounter.get(volume_id) if mounter else None
            if mounter is None or mounted is None or mountinfo.read().at(path) is None:
                raise VolumeNotFound(f"volume {volume_id} is not at {path}")
            mounter.resize(volume_id, size_bytes)
            return max(size_bytes, mounted.spec.capacity_bytes)

    def refresh(self, volume_id: str) -> bool:
        """Apply the Datastore's present settings to a mounted volume; return False when its usage is not known yet.

        Errors: VolumeBusy, NotAnswering.
        """
        self._datastores.seen(volume_id, FRESH_S)  # before the lock is taken, because the API server may be slow
        with self._locks.hold(volume_id):
            mounter = self._mounter_of(volume_id)
            mounted = mounter.get(volume_id) if mounter else None
            if mounter is None or mounted is None or mounted.ephemeral:
                return True
            current = self._datastores.again(volume_id)
            if current is None:
                return True
            present = mounted.spec
            wanted = Wanted(volume_id=volume_id, context=current.context, secrets={}, access=Access())
            spec = mount_spec(wanted, present.mountpoint, self._settings)
            # The source stays: a part of it comes from the Secret, which is passed only with a publish.
            mounter.renew(volume_id, _filled(replace(spec, source=present.source), current.usage))
            return current.usage is not None

    def stats(self, volume_id: str, path: str) -> Stats:
        """Return size, usage and condition within seconds, in whatever state the mount is. Errors: VolumeNotFound."""
        mounter = self._mounter_of(volume_id)
        mounted = mounter.get(volume_id) if mounter else None
        if mounter is None or mounted is None:
            raise VolumeNotFound(f"volume {volume_id} is not mounted on this node")
        table = mountinfo.read()
        there, source = table.at(path), table.at(mounted.spec.mountpoint)
        if there is None and not os.path.lexists(path):
            raise VolumeNotFound(f"volume {volume_id} is not at {path}")
        stats = mounter.stats(volume_id)
        if there is None:
            return stats._replace(trouble=f"nothing is mounted at {path}")
        if source is None or source.device != there.device:
            return stats._replace(trouble=f"{path} shows a mount that has ended; the pod has to be restarted")
        why_not = self.kernel.why_not(mounted.spec.source)
        if mounter is self.fuse and mounted.spec.source.kind == "nfs" and why_not:
            return stats._replace(condition=f"{stats.condition}: {why_not}")
        return stats

    @property
    def _mounters(self) -> tuple[Mounter, ...]:
        return (self.fuse, self.kernel)

    def _mounter_of(self, volume_id: str) -> Mounter | None:
        return next((mounter for mounter in self._mounters if mounter.get(volume_id) is not None), None)

    def _chosen(self, volume_id: str, spec: MountSpec) -> Mounter:
        """Choose the mounter: the one that has the volume mounted, else the kernel if it can mount it, else FUSE."""
        there = mountinfo.read().at(spec.mountpoint)
        mounter = self._mounter_of(volume_id)
        if there is not None and mounter is not None:
            return mounter
        if there is not None and there.fstype in mountinfo.SUPERVISED:
            return self.fuse  # the mount daemon has it, or unmounts it
        return self.fuse if self.kernel.why_not(spec.source) else self.kernel

    # -- with the volume's lock held

    def _mount(self, wanted: Wanted, mountpoint: str, *, fresh: bool = False) -> MountSpec:
        """Mount a volume with its present settings, or update its mount. fresh: see Datastores.current."""
        current = self._datastores.current(wanted.volume_id, wanted.context, fresh=fresh)
        spec = mount_spec(replace(wanted, context=current.context), mountpoint, self._settings)
        spec = _filled(spec, current.usage)
        mounter = self._chosen(wanted.volume_id, spec)
        make_directory(mountpoint)
        mounter.mount(wanted.volume_id, spec, ephemeral=wanted.ephemeral)
        self._failing_since.pop(wanted.volume_id, None)
        return spec

    def _unmount(self, volume_id: str, mountpoint: str) -> None:
        since = self._failing_since.get(volume_id)
        force = since is not None and self._clock() - since > GIVE_UP_S
        mounter = self._mounter_of(volume_id) or self._owner_at(volume_id, mountpoint)
        if mounter is None:
            return
        try:
            mounter.unmount(volume_id, mountpoint, force=force)
        except Unsent as error:
            self._failing_since.setdefault(volume_id, self._clock())
            log.warning("not everything is uploaded", extra=fields(volume=volume_id, reason=error))
            raise
        self._failing_since.pop(volume_id, None)
        # Given up, or the volume's processes ended before this call, as in a reboot: then nobody has its keys any more.
        if left := self.left_files().get(volume_id):
            log.error(
                "files that are not uploaded stay on this node's disk", extra=fields(volume=volume_id, files=left)
            )
        self._datastores.forget(volume_id)

    def _owner_at(self, volume_id: str, mountpoint: str) -> Mounter | None:
        """Return the mounter that may have a volume, or a mount in its place, which this process does not know."""
        there = mountinfo.read().at(mountpoint)
        if there is not None and there.fstype not in mountinfo.SUPERVISED:
            return self.kernel
        of_daemon = there is not None or (self._settings.state_root / key_of(volume_id)).exists()
        return self.fuse if of_daemon else None

    def _inline(self, volume_id: str) -> str:
        return str(self._settings.inline_root / key_of(volume_id) / "mount")

    def _resolved(self, wanted: Wanted) -> Wanted | None:
        """Replace an inline volume's reference to a Datastore in the pod's namespace by that Datastore's attributes.

        Return None when the API server does not answer and the volume is mounted: then its mount is left as it is.
        """
        if not wanted.ephemeral:
            return wanted
        if volumecontext.REFERENCE not in wanted.context:
            check_endpoint(wanted, self._settings.policy)
            return wanted
        named = volumecontext.from_context(wanted.context)
        if not isinstance(named, volumecontext.Reference):
            raise InvalidManifest(f"volumeAttributes: {volumecontext.REFERENCE} names no Datastore")
        namespace = wanted.context.get(POD_NAMESPACE, "")
        if self._cluster is None or not namespace:
            raise Refused(f"Datastore {named.name} can't be looked up: this driver does not run in a cluster")
        mounted = self._mounter_of(wanted.volume_id) is not None
        try:
            found = self._cluster.named(namespace, named.name)
        except Unreachable:
            if not mounted:
                raise
            return None
        if found.ending and not mounted:
            # The controller has already counted the pods whose end it waits for.
            raise Refused(f"Datastore {named.name} is being deleted; no other pod gets it")
        rest = {name: text for name, text in wanted.context.items() if name != volumecontext.REFERENCE}
        resolved = replace(wanted, context={**rest, **found.attributes})
        if not wanted.secrets and needs_secret(resolved.context):
            raise InvalidManifest(_keyless(named.name, found.secret))
        return resolved

    def _take(self, step: plan.Step) -> None:
        if isinstance(step, plan.Unmount):
            self.commands.unmount_all(step.path)
        else:
            self.commands.bind(step.source, step.target, read_only=step.read_only)


def _pod_usage(settings: Settings, cluster: Cluster | None) -> PodUsage | None:
    """None outside a cluster, where no API server takes the reports."""
    if cluster is None:
        return None
    recall, tell = partial(cluster.usage, settings.node_id), partial(cluster.tell_usage, settings.node_id)
    return PodUsage(settings.pods_dir, settings.host_proc, settings.host_cgroups, recall, tell)


def needs_secret(context: Mapping[str, str]) -> bool:
    """Return whether a volume's storage needs credentials; an NFS server checks only the node's address."""
    spec = volumecontext.from_context(context)
    return isinstance(spec, volumecontext.Reference) or spec.s3 is not None or spec.sftp is not None


def _filled(spec: MountSpec, usage: tuple[int, int] | None) -> MountSpec:
    if usage is None:
        return spec
    return replace(spec, used_bytes=usage[0], used_files=usage[1])


def _keyless(name: str, secret: str) -> str:
    """Say what to do about an inline volume of this Datastore without keys: the plugin may not read a Secret itself."""
    claim = f"persistentVolumeClaim: {{claimName: {name}}}"
    if not secret:
        return f"Datastore {name} has no Secret in this namespace that an inline volume could name; use {claim}"
    return f"an inline volume of Datastore {name} needs nodePublishSecretRef: {{name: {secret}}}; or use {claim}"
