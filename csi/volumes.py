"""The work of the node service, without gRPC: blocking calls, one at a time per volume, each with a deadline.

A volume is mounted once per node, at its staging path, by the keeper's host; pods see bind mounts of it. Every call
computes what is missing from the mount table and may be repeated. INVARIANT: `holdings` has a copy of the descriptors
of each mount that this process asked for or found at its start, until it is unmounted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from datastore import mountinfo
from datastore.api import volumecontext
from datastore.api.mountspec import MountSpec
from datastore.api.names import PODS_OF
from datastore.errors import InvalidManifest, Unreachable
from datastore.logs import fields

from . import mounter, plan
from .errors import KeeperAway, KeeperOld, Refused, Unsent, VolumeBusy, VolumeNotFound
from .held import Held, Holdings
from .keeper import control
from .keeper.protocol import Keeper, export_of
from .kubeapi import Named
from .locks import VolumeLocks
from .request import POD_NAMESPACE, Wanted, check_endpoint, key_of, mount_spec
from .settings import Settings

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
GIVE_UP_S = 600.0
"""How long uploads are tried at the end of a volume on this node; then it goes, and what is left stays on the disk."""
LARGEST_BYTES = 1 << 50
"""What a volume without capacity shows, as its statfs does."""

Lookup = Callable[[str, str], Named]
"""A Datastore's volume by its namespace and name. Errors: NotFound, Refused, AccessDenied, Unreachable."""


class Stats(NamedTuple):
    """What a volume shows, as its statfs does; used may be more than total. trouble: what is wrong with it, or ''."""

    total_bytes: int
    used_bytes: int
    used_files: int
    trouble: str = ""


class Volumes:
    """All volumes of this node, as the plugin sees them."""

    def __init__(self, settings: Settings, lookup: Lookup | None = None, clock: Callable[[], float] = time.monotonic):
        self.holdings = Holdings()
        self._settings = settings
        self._keeper = Keeper(settings.keeper_socket, settings.node_id)
        self._lookup = lookup
        self._clock = clock
        self._locks = VolumeLocks()
        self._failing_since: dict[str, float] = {}

    def hold_all(self) -> int:
        """Take copies of what the keeper's host holds, for a host to come; how many. Errors: KeeperAway."""
        found = export_of(self._settings.keeper_socket)
        for held in found:
            try:
                with self._locks.hold(held.volume_id):
                    if mountinfo.read().at(held.spec.mountpoint) is not None:
                        self.holdings.put(held)
                        continue
            except VolumeBusy:  # that call knows better
                pass
            held.close()
        return len(found)

    def ping(self) -> None:
        """Errors: KeeperAway when the keeper's host does not answer."""
        self._keeper.ping()

    def stage(self, wanted: Wanted) -> None:
        """Mount the volume at its staging path, or make sure that it is."""
        with self._locks.hold(wanted.volume_id):
            self._mount(wanted, wanted.staging_path)

    def publish(self, wanted: Wanted) -> None:
        """Show the volume at the target path. Repeated by the kubelet every minute or so, with the present Secret."""
        with self._locks.hold(wanted.volume_id):
            source = self._inline(wanted.volume_id) if wanted.ephemeral else wanted.staging_path
            resolved = self._resolved(wanted)
            if resolved is not None:
                self._mount(resolved, source)
            mounter.make_directory(wanted.target_path)
            read_only = wanted.read_only or wanted.access.read_only
            for step in plan.publish(mountinfo.read(), source, wanted.target_path, read_only=read_only):
                _take(step)

    def unpublish(self, volume_id: str, target: str) -> None:
        """Take the target away; an inline volume ends with it. What is unknown or gone is success."""
        with self._locks.hold(volume_id):
            mounter.unmount_all(target)
            mounter.remove_directory(target)
            inline = self._inline(volume_id)
            if os.path.isdir(os.path.dirname(inline)):
                self._unmount(volume_id, inline)
                mounter.remove_directory(inline)
                mounter.remove_directory(os.path.dirname(inline))

    def unstage(self, volume_id: str, staging: str) -> None:
        """Upload what is left and unmount. What is unknown or gone is success."""
        with self._locks.hold(volume_id):
            self._unmount(volume_id, staging)

    def expand(self, volume_id: str, path: str, size_bytes: int) -> int:
        """Show the volume larger; its size. Errors: VolumeNotFound."""
        with self._locks.hold(volume_id):
            held = self.holdings.get(volume_id)
            if held is None or mountinfo.read().at(path) is None:
                raise VolumeNotFound(f"volume {volume_id} is not at {path}")
            if held.spec.capacity_bytes and size_bytes > held.spec.capacity_bytes:
                larger = replace(held.spec, capacity_bytes=size_bytes)
                self.holdings.put(self._kept(volume_id, larger, ephemeral=held.ephemeral))
            return max(size_bytes, held.spec.capacity_bytes)

    def fill(self, volume_id: str, used_bytes: int, used_files: int) -> None:
        """Show the volume as so full; one that is not mounted is left alone. Errors: VolumeBusy, KeeperAway."""
        with self._locks.hold(volume_id):
            held = self.holdings.get(volume_id)
            if held is None or mountinfo.read().at(held.spec.mountpoint) is None:
                return
            filled = replace(held.spec, used_bytes=used_bytes, used_files=used_files)
            if filled != held.spec:
                self.holdings.put(self._kept(volume_id, filled, ephemeral=held.ephemeral))

    def stats(self, volume_id: str, path: str) -> Stats:
        """What the volume shows. Asks the mount's server how it is, never the mount, and not for long.

        Errors: VolumeNotFound.
        """
        there, held = mountinfo.read().at(path), self.holdings.get(volume_id)
        if held is None:
            raise VolumeNotFound(f"volume {volume_id} is not mounted on this node")
        if there is None:
            if not os.path.lexists(path):
                raise VolumeNotFound(f"volume {volume_id} is not at {path}")
            return shown(held.spec)._replace(trouble=f"nothing is mounted at {path}")
        source = mountinfo.read().at(held.spec.mountpoint)
        if source is None or source.device != there.device:
            return shown(held.spec)._replace(
                trouble=f"{path} shows a mount that has ended; the pod has to be restarted"
            )
        try:
            answer = control.ask(Path(held.spec.state_dir), {"op": "status"}, STATUS_TIMEOUT_S)
        except KeeperAway as error:
            return shown(held.spec)._replace(trouble=f"{error}; it is being replaced")
        return shown(held.spec)._replace(trouble=_trouble(answer))

    # -- inside a volume's lock

    def _mount(self, wanted: Wanted, mountpoint: str) -> None:
        spec = mount_spec(wanted, mountpoint, self._settings)
        self._settings.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        mounter.make_directory(mountpoint)
        self.holdings.put(self._kept(wanted.volume_id, spec, ephemeral=wanted.ephemeral))
        self._failing_since.pop(wanted.volume_id, None)

    def _kept(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> Held:
        """Mounted by the keeper's host as the specification says."""
        try:
            return self._keeper.mount(volume_id, spec, ephemeral=ephemeral)
        except KeeperOld as error:
            raise KeeperOld(_outdated(self._settings.node_id, error)) from None

    def _unmount(self, volume_id: str, mountpoint: str) -> None:
        since = self._failing_since.get(volume_id)
        force = since is not None and self._clock() - since > GIVE_UP_S
        try:
            self._keeper.unmount(volume_id, mountpoint, force=force)
        except Unsent as error:
            self._failing_since.setdefault(volume_id, self._clock())
            log.warning("not everything is uploaded", extra=fields(volume=volume_id, reason=error))
            raise
        if force:
            log.error("gave up uploading; what is left is in the state directory", extra=fields(volume=volume_id))
        self._failing_since.pop(volume_id, None)
        self.holdings.drop(volume_id)

    def _inline(self, volume_id: str) -> str:
        return str(self._settings.inline_root / key_of(volume_id) / "mount")

    def _resolved(self, wanted: Wanted) -> Wanted | None:
        """An inline volume that names a Datastore becomes that one's, from the pod's own namespace.

        None when the API server does not answer and it is mounted already: then that is left as it is.
        """
        if not wanted.ephemeral:
            return wanted
        if volumecontext.REFERENCE not in wanted.context:
            check_endpoint(wanted, self._settings.endpoints)
            return wanted
        named = volumecontext.from_context(wanted.context)
        if not isinstance(named, volumecontext.Reference):
            raise InvalidManifest(f"volumeAttributes: {volumecontext.REFERENCE} names no Datastore")
        namespace = wanted.context.get(POD_NAMESPACE, "")
        if self._lookup is None or not namespace:
            raise Refused(f"Datastore {named.name} can't be looked up: this driver does not run in a cluster")
        try:
            found = self._lookup(namespace, named.name)
        except Unreachable:
            if self.holdings.get(wanted.volume_id) is None:
                raise
            return None
        if found.ending and self.holdings.get(wanted.volume_id) is None:
            # The controller has looked for the pods that it waits for.
            raise Refused(f"Datastore {named.name} is being deleted; no other pod gets it")
        if not wanted.secrets:
            raise InvalidManifest(_keyless(named.name, found.secret))
        kept = {name: text for name, text in wanted.context.items() if name != volumecontext.REFERENCE}
        return replace(wanted, context={**kept, **found.attributes})


def shown(spec: MountSpec) -> Stats:
    """What the statfs of a mount shows, from what it was told."""
    total = spec.capacity_bytes or LARGEST_BYTES
    return Stats(total, spec.used_bytes or 0, spec.used_files or 0)


def _outdated(node: str, error: KeeperOld) -> str:
    """What to do about a keeper that was not replaced with the node plugin (docs/OPERATIONS.md, "Upgrade")."""
    return (
        f"the keeper of node {node} is older than its node plugin ({error}). Delete its pod, and programs on that node"
        f" pause for seconds: kubectl delete pod -A -l {PODS_OF}keeper --field-selector spec.nodeName={node}"
    )


def _keyless(name: str, secret: str) -> str:
    """What to do about an inline volume of this Datastore without keys: the plugin may read no Secret by itself."""
    claim = f"persistentVolumeClaim: {{claimName: {name}}}"
    if not secret:
        return f"Datastore {name} has no Secret in this namespace that an inline volume could name; use {claim}"
    return f"an inline volume of Datastore {name} needs nodePublishSecretRef: {{name: {secret}}}; or use {claim}"


def _take(step: plan.Step) -> None:
    if isinstance(step, plan.Unmount):
        mounter.unmount_all(step.path)
    else:
        mounter.bind(step.source, step.target, read_only=step.read_only)


def _trouble(answer: Mapping[str, Any]) -> str:
    """What a server's status says is wrong, for people; ''."""
    if answer.get("ok") is not True:
        return "the mount server reports no status"
    failed = [each for each in answer.get("dirty", []) if isinstance(each, dict) and each.get("error")]
    return f"{len(failed)} files could not be uploaded yet: {failed[0]['error']}" if failed else ""
