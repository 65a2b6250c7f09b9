"""The keeper's host: mounts and keeps the volumes of this node, for a plugin that may come and go.

Its pod has OnDelete updates and nothing to do with the kubelet, so it is rarely replaced; when it is, the next one
takes the mounts from the plugin, which holds copies of all descriptors (held.py), and the servers start anew: users
see a pause. Requests and answers are in protocol.py. Threads: any; one call at a time works on a volume.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from datastore import mountinfo
from datastore.api.mountspec import MountSpec
from datastore.errors import DatastoreError, MountFailed
from datastore.logs import fields

from .. import mounter
from ..errors import KeeperAway, Refused, Unsent
from ..held import Held, Holdings
from ..locks import VolumeLocks
from . import control
from .cgroups import Cgroups
from .kept import KeptMount, Setting, server_pid

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
"""For uploading what is left. The kubelet gives a call two minutes, and comes again."""
RENEW_TIMEOUT_S = 5.0
ALIVE_TIMEOUT_S = 8.0
"""A server gives itself 5 s to tell of itself."""
REPLACED_S, REPLACED_POLL_S = 15.0, 0.1
"""A server that died is replaced within a second or two, longer on a busy node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """For people and tests."""

    volume_id: str
    mountpoint: str
    state_dir: str
    keeper_pid: int
    server_pid: int


class Host:
    """All mounts of a node. INVARIANT: `holdings` and `_mounts` have the same volumes whenever no lock is held."""

    def __init__(self, cgroups: Cgroups) -> None:
        self.holdings = Holdings()
        self._cgroups = cgroups
        self._locks = VolumeLocks()
        self._mounts: dict[str, KeptMount] = {}

    def mount(self, setting: Setting) -> Held:
        """Mounted as asked, anew or already; copies of the descriptors, which the caller closes.

        Of a mount that stands only keys, group, capacity and use change. Errors: VolumeBusy; Refused when pods want
        different groups; whatever kept it from being mounted.
        """
        with self._locks.hold(setting.volume_id):
            kept = self._alive(setting)
            if kept is not None:
                self._renew(kept, setting.spec)
            else:
                self._clear(setting.volume_id, setting.spec.mountpoint)
                self._start(setting, None)
            copy = self.holdings.copy(setting.volume_id)
            if copy is None:
                raise MountFailed(f"volume {setting.volume_id} was unmounted by someone at once")
            return copy

    def adopt(self, held: Held) -> None:
        """Go on with a mount of an earlier host; takes the descriptors. Nothing when it is not mounted any more."""
        spec = held.spec
        with self._locks.hold(held.volume_id):
            there = mountinfo.read().at(spec.mountpoint)
            if held.volume_id in self._mounts or there is None or there.fstype != mountinfo.FSTYPE:
                held.close()
                return
            setting = Setting(volume_id=held.volume_id, spec=spec, ephemeral=held.ephemeral)
            self._start(setting, held)
            log.warning("a mount was adopted", extra=fields(volume=held.volume_id, at=spec.mountpoint))

    def unmount(self, volume_id: str, mountpoint: str, *, force: bool) -> None:
        """Upload what is left, unmount, forget; an unknown volume is success, and whatever lies at `mountpoint` goes.

        force: unmount also when uploading fails; what is left stays in the state directory. Errors: VolumeBusy; Unsent;
        MountFailed.
        """
        with self._locks.hold(volume_id):
            kept = self._mounts.get(volume_id)
            if kept is not None:
                self._stop(kept, force=force)
                mountpoint = mountpoint or kept.spec.mountpoint
            self._clear(volume_id, mountpoint)
            if kept is not None:
                _forget(Path(kept.spec.state_dir))

    def states(self) -> list[KeptState]:
        """All mounts."""
        return [
            KeptState(
                volume_id=volume_id,
                mountpoint=kept.spec.mountpoint,
                state_dir=kept.spec.state_dir,
                keeper_pid=kept.keeper_pid,
                server_pid=server_pid(kept.spec),
            )
            for volume_id, kept in list(self._mounts.items())
        ]

    def abandon(self) -> None:
        """End all processes and unmount nothing: who holds the descriptors goes on."""
        for kept in list(self._mounts.values()):
            kept.kill()
        self.holdings.clear()

    def flush(self, timeout_s: float) -> None:
        """Ask every server to upload what is left, as far as it gets; for the end of the node."""
        for kept in list(self._mounts.values()):
            try:
                control.ask(Path(kept.spec.state_dir), {"op": "flush"}, timeout_s)
            except KeeperAway as error:
                log.warning("not flushed", extra=fields(volume=kept.setting.volume_id, error=error))

    def _alive(self, setting: Setting) -> KeptMount | None:
        """The mount, if it stands where it is asked for."""
        kept = self._mounts.get(setting.volume_id)
        if kept is None or kept.over.is_set():
            return None
        if kept.spec.mountpoint != setting.spec.mountpoint:
            if mountinfo.read().at(kept.spec.mountpoint) is None:
                return None
            raise Refused(
                f"volume {setting.volume_id} is mounted at {kept.spec.mountpoint} on this node; it can't be at"
                f" {setting.spec.mountpoint} as well"
            )
        there = mountinfo.read().at(setting.spec.mountpoint)
        return kept if there is not None and there.fstype == mountinfo.FSTYPE else None

    def _start(self, setting: Setting, held: Held | None) -> None:
        cgroup = self._cgroups.of(setting.volume_id, setting.spec.memory_bytes)
        kept = KeptMount(setting, cgroup, self._ended)
        started = kept.start(held)
        self._mounts[setting.volume_id] = kept
        self.holdings.put(started.duplicate())
        if kept.over.is_set():  # it ended before it was here to be forgotten
            self._ended(kept)

    def _ended(self, kept: KeptMount) -> None:
        volume_id = kept.setting.volume_id
        if self._mounts.get(volume_id) is kept:
            del self._mounts[volume_id]
            self.holdings.drop(volume_id)

    def _renew(self, kept: KeptMount, wanted: MountSpec) -> None:
        """Bring a live mount to what is wanted, as far as that is possible without a remount."""
        present = kept.spec
        credentials = wanted.s3.credentials or present.s3.credentials
        sized = replace(
            present,
            group=_group(present, wanted),
            capacity_bytes=max(present.capacity_bytes, wanted.capacity_bytes),
        )
        shown = sized if wanted.used_bytes is None else _filled(sized, wanted)
        renewed = replace(shown, s3=replace(present.s3, credentials=credentials))
        if renewed == present:
            return
        kept.renew(renewed)
        self.holdings.renew(kept.setting.volume_id, renewed)
        if shown != present:
            self._tell(kept, _show(renewed), insist=sized != present)
        if credentials != present.s3.credentials:
            self._tell(kept, control.renewal(renewed))
            log.info("credentials were renewed", extra=fields(volume=kept.setting.volume_id))

    def _tell(self, kept: KeptMount, request: control.Answer, *, insist: bool = True) -> None:
        """Tell the running server; one that does not answer or understand is replaced, and starts with what is new.

        One that is just starting was started with what is old, and is waited for. insist: else what it was to be told
        is not worth all that.
        """
        end = time.monotonic() + REPLACED_S
        while not _told(kept, request) and insist and not kept.end_server():
            if time.monotonic() >= end:
                log.warning("no server could be told what changed", extra=fields(volume=kept.setting.volume_id))
                return
            time.sleep(REPLACED_POLL_S)

    def _stop(self, kept: KeptMount, *, force: bool) -> None:
        kept.expect_end(0)
        try:
            answer = _patiently(Path(kept.spec.state_dir), {"op": "stop", "force": force})
        except KeeperAway as error:
            self._stop_silent(kept, error, force=force)
            return
        if answer["ok"] is not True:
            kept.cancel_end()
            told = "; ".join(str(each) for each in answer.get("errors", [])) or "no reason given"
            raise Unsent(f"volume {kept.setting.volume_id} stays mounted: {told}")
        if not kept.expect_end():
            kept.kill()

    def _stop_silent(self, kept: KeptMount, error: DatastoreError, *, force: bool) -> None:
        """A server that does not answer: it is being replaced, or it hangs."""
        if not force:
            kept.cancel_end()
            raise Unsent(f"volume {kept.setting.volume_id} stays mounted for now: {error}")
        kept.kill()

    def _clear(self, volume_id: str, mountpoint: str) -> None:
        """Whatever is left of an earlier mount: a keeper that lost its mount, a mount that lost its keeper."""
        kept = self._mounts.get(volume_id)
        if kept is not None:
            kept.kill()
            self._ended(kept)
        self.holdings.drop(volume_id)
        if mountpoint:
            mounter.unmount_all(mountpoint)


def _told(kept: KeptMount, request: control.Answer) -> bool:
    try:
        return control.ask(Path(kept.spec.state_dir), request, RENEW_TIMEOUT_S)["ok"] is True
    except KeeperAway:
        return False


def _patiently(state_dir: Path, request: dict[str, object]) -> control.Answer:
    """Ask a server that may just be replaced; one that hangs is told by a small question. Errors: KeeperAway."""
    end = time.monotonic() + REPLACED_S
    while True:
        try:
            control.ask(state_dir, {"op": "status"}, ALIVE_TIMEOUT_S)
            return control.ask(state_dir, request, STOP_TIMEOUT_S)
        except KeeperAway:
            if time.monotonic() >= end:
                raise
            time.sleep(REPLACED_POLL_S)


def _filled(present: MountSpec, wanted: MountSpec) -> MountSpec:
    return replace(present, used_bytes=wanted.used_bytes, used_files=wanted.used_files)


def _show(spec: MountSpec) -> control.Answer:
    return {
        "op": "show",
        "group": spec.group,
        "capacityBytes": spec.capacity_bytes,
        "usedBytes": spec.used_bytes or 0,
        "usedFiles": spec.used_files or 0,
    }


def _group(present: MountSpec, wanted: MountSpec) -> int | None:
    if present.group is None or wanted.group in {None, present.group}:
        return wanted.group if present.group is None else present.group
    raise Refused(
        f"{present.name} is mounted on this node for pods with fsGroup {present.group}; this pod has {wanted.group}."
        " Give the pods of a volume the same fsGroup"
    )


def _forget(state_dir: Path) -> None:
    """Remove a state directory in which nothing waits to be sent."""
    try:
        if not any((state_dir / "staging").iterdir()):
            shutil.rmtree(state_dir)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("a state directory stays", extra=fields(directory=state_dir, error=error))
