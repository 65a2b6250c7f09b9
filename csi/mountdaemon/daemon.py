"""The mount daemon: it mounts the volumes of this node and supervises the mounts, for a plugin that may be replaced.

Its pod has the update strategy OnDelete and no contact with the kubelet, so it is rarely replaced. When it is, the next
daemon gets the mounts from the plugin, which has copies of all descriptors (handle.py), and starts new servers; users
see a pause. The requests and answers are in protocol.py. Any thread may call; one call at a time works on a volume.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datastore import controlclient, mountinfo
from datastore.api.mountspec import MountSpec
from datastore.api.source import credentials_of, with_credentials
from datastore.controlclient import Answer
from datastore.errors import DatastoreError, MountFailed
from datastore.logs import fields

from ..commands import Commands, remove_tree
from ..errors import NotAnswering, Refused, Unsent
from ..handle import HandleTable, MountHandle
from ..locks import VolumeLocks
from .cgroups import Cgroups
from .supervisor import MountRequest, SupervisedMount, server_pid

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
"""Time to upload what is left. The kubelet waits two minutes for a call, and then retries."""
ENDED_TIMEOUT_S = 55.0
"""Time for a server to end after the unmount; it waits for running requests."""
BUSY_S = 15.0
"""How long an unmount is retried: a process that looks at all mounts of the node may use a mount for a moment."""
RENEW_TIMEOUT_S = 15.0
"""A server that does not take new settings in this time is killed. Even a busy node has to stay below it."""
TOLD_S = 40.0
"""How long to wait for a server that is still starting, before it can be told new settings."""
FIXED = (
    "name",
    "mountpoint",
    "state_dir",
    "cache_dir",
    "read_only",
    "allow_other",
    "transport",
    "metrics",
    "uid",
    "gid",
    "umask",
    "labels",
    "version",
)
"""The fields of MountSpec that only a remount can change; all others are applied to a live mount."""
BY_READ_ONLY = ("attributes", "metadata_ttl_s")
"""Fields whose defaults depend on read_only."""
ALIVE_TIMEOUT_S = 8.0
"""More than the 5 s that a server gives itself to answer a status request."""
TOLD_LENGTH = 500
"""The most characters of a server's texts that are logged or reported."""
HIDDEN = {"nfs": "hidden.log", "sftp": "mount-id"}
"""By the kind of the source: the file of a state directory that an ended mount leaves with content when hidden names of
removed files may still be on the server, for the next mount to remove (S-265, S-274)."""
REPLACED_S, REPLACED_POLL_S = 15.0, 0.1
"""How long, and how often, to retry: a dead server is replaced in a second or two, later on a busy node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountState:
    """The state of a mount, for people and tests."""

    volume_id: str
    mountpoint: str
    state_dir: str
    supervisor_pid: int
    server_pid: int
    oom_kills: int = 0


class MountDaemon:
    """All mounts of a node. INVARIANT: `handles` and `_mounts` have the same volumes while no volume's lock is held."""

    def __init__(self, cgroups: Cgroups) -> None:
        self.handles = HandleTable()
        self._cgroups = cgroups
        self._commands = Commands()
        self._locks = VolumeLocks()
        self._mounts: dict[str, SupervisedMount] = {}

    def mount(self, request: MountRequest) -> MountHandle:
        """Mount the volume unless it is mounted; return a copy of its handle, which the caller closes.

        The specification is applied to a mount that is there already, but for FIXED. Errors: VolumeBusy; Refused when
        pods want different groups; whatever the supervisor reports.
        """
        with self._locks.hold(request.volume_id):
            mount = self._alive(request)
            if mount is not None:
                self._renew(mount, request.spec)
            else:
                self._clear(request.volume_id, request.spec.mountpoint)
                self._start(request, None)
            copy = self.handles.copy(request.volume_id)
            if copy is None:
                raise MountFailed(f"volume {request.volume_id} was unmounted by someone at once")
            return copy

    def adopt(self, handle: MountHandle) -> None:
        """Take over an earlier daemon's mount, and own its handle; close that if the volume is not mounted any more."""
        spec = handle.spec
        with self._locks.hold(handle.volume_id):
            there = mountinfo.read().at(spec.mountpoint)
            if handle.volume_id in self._mounts or there is None or there.fstype not in mountinfo.SUPERVISED:
                handle.close()
                return
            request = MountRequest(volume_id=handle.volume_id, spec=spec, ephemeral=handle.ephemeral)
            self._start(request, handle)
            log.warning("a mount was adopted", extra=fields(volume=handle.volume_id, at=spec.mountpoint))

    def unmount(self, volume_id: str, mountpoint: str, *, force: bool) -> None:
        """Upload what is left, unmount, and forget the volume; even of an unknown volume `mountpoint` is unmounted.

        force: unmount even if uploads fail; their data stays in the state directory. Errors: VolumeBusy; Unsent;
        MountFailed.
        """
        with self._locks.hold(volume_id):
            mount = self._mounts.get(volume_id)
            if mount is not None:
                self._stop(mount, force=force)
                mountpoint = mountpoint or mount.spec.mountpoint
            self._clear(volume_id, mountpoint)
            if mount is not None:
                self._forget(mount.spec)

    def states(self) -> list[MountState]:
        return [
            MountState(
                volume_id=volume_id,
                mountpoint=mount.spec.mountpoint,
                state_dir=mount.spec.state_dir,
                supervisor_pid=mount.supervisor_pid,
                server_pid=server_pid(mount.spec),
                oom_kills=mount.oom_kills,
            )
            for volume_id, mount in list(self._mounts.items())
        ]

    def abandon(self) -> None:
        """End all processes and unmount nothing: a process with copies of the handles can continue the mounts."""
        for mount in list(self._mounts.values()):
            mount.kill()
        self.handles.clear()

    def flush(self, timeout_s: float) -> None:
        """Have all servers upload what they can, at the same time, for timeout_s; for the shutdown of the node."""

        def one(mount: SupervisedMount) -> None:
            try:
                controlclient.ask(Path(mount.spec.state_dir), {"op": "flush"}, timeout_s)
            except NotAnswering as error:
                log.warning("not flushed", extra=fields(volume=mount.request.volume_id, error=error))

        mounts = list(self._mounts.values())
        if mounts:
            with ThreadPoolExecutor(len(mounts), thread_name_prefix="flush") as pool:
                list(pool.map(one, mounts))

    def _alive(self, request: MountRequest) -> SupervisedMount | None:
        """Return the volume's mount if it stands at the requested place. Errors: Refused when it stands elsewhere."""
        mount = self._mounts.get(request.volume_id)
        if mount is None or mount.over.is_set():
            return None
        if mount.spec.mountpoint != request.spec.mountpoint:
            if mountinfo.read().at(mount.spec.mountpoint) is None:
                return None
            raise Refused(
                f"volume {request.volume_id} is mounted at {mount.spec.mountpoint} on this node; it can't be at"
                f" {request.spec.mountpoint} as well"
            )
        there = mountinfo.read().at(request.spec.mountpoint)
        return mount if there is not None and there.fstype in mountinfo.SUPERVISED else None

    def _start(self, request: MountRequest, handle: MountHandle | None) -> None:
        cgroup = self._cgroups.of(request.volume_id, request.spec.memory_bytes)
        mount = SupervisedMount(request, cgroup, self._ended)
        started = mount.start(handle)
        self._mounts[request.volume_id] = mount
        self.handles.put(started.duplicate())
        if mount.over.is_set():  # it ended before it was in the tables, so that _ended() found nothing
            self._ended(mount)

    def _ended(self, mount: SupervisedMount) -> None:
        volume_id = mount.request.volume_id
        if self._mounts.get(volume_id) is mount:
            del self._mounts[volume_id]
            self.handles.drop(volume_id)

    def _renew(self, mount: SupervisedMount, wanted: MountSpec) -> None:
        """Apply a specification to a live mount, as far as that is possible without a remount."""
        present = mount.spec
        fixed = FIXED if wanted.read_only == present.read_only else (*FIXED, *BY_READ_ONLY)
        unknown = () if wanted.used_bytes is not None else ("used_bytes", "used_files")
        unchanged: dict[str, Any] = {name: getattr(present, name) for name in (*fixed, *unknown)}
        renewed = replace(
            wanted,
            **unchanged,
            group=_group(present, wanted),
            capacity_bytes=max(present.capacity_bytes, wanted.capacity_bytes),
            source=with_credentials(wanted.source, credentials_of(wanted.source) or credentials_of(present.source)),
        )
        if renewed == present and not mount.untold:
            return
        filled = replace(present, used_bytes=renewed.used_bytes, used_files=renewed.used_files)
        insist = mount.untold or renewed != filled
        self._set(mount, renewed)
        mount.untold = not self._tell(mount, present, insist=insist) and insist

    def _set(self, mount: SupervisedMount, spec: MountSpec) -> None:
        """Set the specification for future servers of the mount."""
        mount.renew(spec)
        self.handles.renew(mount.request.volume_id, spec)

    def _tell(self, mount: SupervisedMount, former: MountSpec, *, insist: bool) -> bool:
        """Send the present specification to the running server; if it can't apply some field, a new server replaces it.
        If the storage refuses its credentials, those of the former specification stay.

        insist: also kill, and so replace, a server that does not take it, and wait for one that is still starting,
        because it was started with the earlier one. Return False when no server has the specification yet.
        """
        volume = mount.request.volume_id
        end = time.monotonic() + TOLD_S
        while True:
            answer = _told(mount)
            if answer.get("ok") is True:
                if refused := answer.get("refused"):
                    log.warning(
                        "the store refuses the new keys of a volume; its mount keeps the former ones",
                        extra=fields(volume=volume, reason=str(refused)[:TOLD_LENGTH]),
                    )
                    kept = with_credentials(mount.spec.source, credentials_of(former.source))
                    self._set(mount, replace(mount.spec, source=kept))
                if later := answer.get("later"):
                    log.info(
                        "a server that can show new settings replaces one",
                        extra=fields(volume=volume, of=str(later)[:TOLD_LENGTH]),
                    )
                    mount.replace_server()
                return True
            if not insist:
                return False
            if mount.end_server():
                return True  # the next one is started with it
            if time.monotonic() >= end:
                log.warning("no server received the changed settings", extra=fields(volume=volume))
                return False
            time.sleep(REPLACED_POLL_S)

    def _stop(self, mount: SupervisedMount, *, force: bool) -> None:
        """Upload and unmount. Until the unmount a supervisor that dies is replaced, as the mount may have to stay."""
        volume_id = mount.request.volume_id
        try:
            answer = _patiently(Path(mount.spec.state_dir), {"op": "flush"})
        except NotAnswering as error:  # the server is being replaced, or it hangs
            if not force:
                raise Unsent(f"volume {volume_id} stays mounted for now: {error}") from error
            mount.kill()
            return
        try:
            if answer["ok"] is not True and not force:
                raise MountFailed(_reasons(answer))
            self._unmount(mount.spec.mountpoint, force=force)
        except DatastoreError as error:
            raise Unsent(f"volume {volume_id} stays mounted: {error}") from error
        if not mount.wait_for_end(ENDED_TIMEOUT_S):
            mount.kill()

    def _unmount(self, mountpoint: str, *, force: bool) -> None:
        """Unmount, which a confined server may not do itself (S-215). Errors: MountFailed when busy, unless forced."""
        if force:
            self._commands.unmount_all(mountpoint)
            return
        end = time.monotonic() + BUSY_S
        while True:
            try:
                self._commands.unmount(mountpoint)
                return
            except MountFailed:
                if time.monotonic() >= end:
                    raise
            time.sleep(REPLACED_POLL_S)

    def _clear(self, volume_id: str, mountpoint: str) -> None:
        """Remove the remains of an earlier mount: a supervisor without its mount, a mount without its supervisor."""
        mount = self._mounts.get(volume_id)
        if mount is not None:
            mount.kill()
            self._ended(mount)
        self.handles.drop(volume_id)
        if mountpoint:
            self._commands.unmount_all(mountpoint)

    def _forget(self, spec: MountSpec) -> None:
        """Remove the state directory of a mount that has ended, unless the next mount needs what is in it."""
        state_dir = Path(spec.state_dir)
        lasting = state_dir / HIDDEN.get(spec.source.kind, "staging")
        with suppress(FileNotFoundError):
            if any(lasting.iterdir()) if lasting.is_dir() else lasting.stat().st_size:
                return
        for each in mountinfo.read().mounts:
            if each.mountpoint.startswith(f"{state_dir}/"):  # by a GlusterFS client that was just starting
                self._commands.unmount_all(each.mountpoint)
        remove_tree(state_dir)
        if state_dir.exists():
            log.warning("a state directory stays", extra=fields(directory=state_dir))


def _told(mount: SupervisedMount) -> Answer:
    """Send the present specification to the server; return its answer, {} if there is none."""
    request = {"op": "settings", "spec": mount.spec.to_json()}  # with keys: never to be logged
    try:
        return controlclient.ask(Path(mount.spec.state_dir), request, RENEW_TIMEOUT_S)
    except NotAnswering:
        return {}


def _reasons(answer: Answer) -> str:
    """Return a server's reasons for a failure, in whatever form it sends them."""
    told = answer.get("errors")
    return "; ".join(map(str, told))[:TOLD_LENGTH] if isinstance(told, list) and told else "no reason given"


def _patiently(state_dir: Path, request: dict[str, object]) -> Answer:
    """Send a request; retry for a while, in case the server is being replaced. A brief status request is sent first, to
    find a server that hangs. Errors: NotAnswering."""
    end = time.monotonic() + REPLACED_S
    while True:
        try:
            controlclient.brief_status(state_dir, ALIVE_TIMEOUT_S)
            return controlclient.ask(state_dir, request, STOP_TIMEOUT_S)
        except NotAnswering:
            if time.monotonic() >= end:
                raise
            time.sleep(REPLACED_POLL_S)


def _group(present: MountSpec, wanted: MountSpec) -> int | None:
    """Return the group for a mount's files. Errors: Refused.

    Another group replaces the present one when no pod has the mount, because the kubelet does not unstage a volume that
    a pod waits for.
    """
    if present.group is None or wanted.group in {None, present.group}:
        return wanted.group if present.group is None else present.group
    if not _is_published(present.mountpoint):
        return wanted.group
    raise Refused(
        f"{present.name} is mounted on this node with fsGroup {present.group}, until the last pod that has it mounted"
        f" here ends; this pod has {wanted.group}. Give the pods of a volume the same fsGroup, or wait for the others"
    )


def _is_published(mountpoint: str) -> bool:
    """Return whether the mount is also shown at another place, that is, to a pod."""
    table = mountinfo.read()
    own = table.at(mountpoint)
    return own is not None and any(each.device == own.device and each.mountpoint != mountpoint for each in table.mounts)
