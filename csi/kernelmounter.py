"""Mounts by the kernel's own file systems: NFS, if the node's kernel has it.

Such a mount needs no process of ours, so it outlives all of them; a file on the node's disk says to which volume it
belongs. When its NFS server is away, a process that touches the mount hangs in the kernel. So only commands, which may
be left behind (commands.py), touch it, and only after the server has answered a request over a connection of our own.

A volume whose server is away is unmounted lazily, so that the pod and the node are free of it at once. What programs
wrote and the server did not confirm stays in the kernel's memory, and is sent when the server is back.
Any thread may call, but only one at a time for a volume.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from datastore import mountinfo, nfsmount, ourprocess
from datastore.api.mountspec import MountSpec, from_json
from datastore.api.source import NFSLocation, Source
from datastore.errors import DatastoreError, InvalidManifest, MountFailed, Unreachable
from datastore.logs import fields
from datastore.nfsclient import FSTYPES, device_of, in_this_kernel, option, silent
from datastore.privatefile import write_json

from .commands import Commands
from .errors import CommandTimeout
from .mounter import LARGEST_BYTES, MountedVolume, Stats
from .request import key_of
from .settings import Settings
from .textformat import Sample

log = logging.getLogger(__name__)

_ENVIRONMENT = {"PYTHONPATH": ourprocess.module_path()}
MOUNTSTATS = Path("/proc/self/mountstats")
MOUNT_TIMEOUT_S = 45.0
UNMOUNT_TIMEOUT_S = 45.0
"""Time to send what programs wrote and the server lacks. The kubelet waits two minutes for a call, and then retries."""
STAT_TIMEOUT_S = 10.0
"""Ample even for a busy node, because the NFS server has just answered."""
ASKED_AT_ONCE = 16
MISSING_AGAIN_S = 300.0
"""How soon a kernel without NFS is checked again, because an administrator may load the module."""


class KernelMounter:
    """See mounter.Mounter. INVARIANT: each volume in `_mounts` has its file in `_directory`."""

    def __init__(self, settings: Settings, commands: Commands) -> None:
        self._directory = settings.plugin_dir / "kernel"
        self._commands = commands
        self._lock = threading.Lock()
        self._mounts: dict[str, MountedVolume] = {}
        self._shown: dict[str, Stats] = {}
        self._missing_until_s = 0.0

    def why_not(self, source: Source) -> str:
        """Say why the kernel can't mount this kind of source, or ''."""
        if not isinstance(source, NFSLocation):
            return f"the kernel does not mount sources of kind {source.kind}"
        return "" if self._has_nfs() else "this node's kernel has no NFS client"

    def adopt(self) -> None:
        """See Mounter. The mounts have outlived the earlier plugin; the files say to which volumes they belong."""
        for path in self._directory.glob("*.json"):
            try:
                written = json.loads(path.read_text())
                spec = from_json(written["spec"])
                found = MountedVolume(volume_id=written["volume"], spec=spec, ephemeral=written["ephemeral"])
            except (OSError, ValueError, KeyError, TypeError, InvalidManifest) as error:
                log.warning("what is known of a mount can't be read", extra=fields(file=path, error=error))
                continue
            if _there(spec):
                with self._lock:
                    self._mounts[found.volume_id] = found
            else:
                path.unlink(missing_ok=True)

    def volumes(self) -> list[str]:
        """See Mounter."""
        with self._lock:
            return list(self._mounts)

    def get(self, volume_id: str) -> MountedVolume | None:
        """See Mounter."""
        with self._lock:
            return self._mounts.get(volume_id)

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> None:
        """See Mounter. Errors: Unreachable when the server does not answer, even if the volume is mounted."""
        if _there(spec):
            if not self._is_stale(spec):
                self._note(MountedVolume(volume_id=volume_id, spec=spec, ephemeral=ephemeral))
                return
            log.warning("an export is not the one that was mounted: mounting it again", extra=fields(volume=volume_id))
        self._commands.unmount_all(spec.mountpoint)
        self._note(MountedVolume(volume_id=volume_id, spec=spec, ephemeral=ephemeral))
        try:
            version = self._mount(spec)
        except BaseException:
            self._forget(volume_id)
            raise
        log.info("mounted by the kernel", extra=fields(volume=volume_id, version=version))

    def renew(self, volume_id: str, spec: MountSpec) -> None:
        """Do nothing: such a mount's settings can't be changed."""

    def unmount(self, volume_id: str, mountpoint: str, *, force: bool) -> None:
        """See Mounter. This succeeds even when the server is away."""
        known = self.get(volume_id)
        path = mountpoint or (known.spec.mountpoint if known else "")
        there = mountinfo.read().at(path)
        if there is not None and there.fstype in FSTYPES:
            trouble = silent(there)
            if trouble:
                log.warning("unmounted lazily", extra=fields(volume=volume_id, reason=trouble))
            else:
                with suppress(MountFailed, CommandTimeout):  # in use, or the server went away just now
                    command = ["umount", "-c", "-i", "-n", "--", path]
                    self._commands.run(command, place=path, timeout_s=UNMOUNT_TIMEOUT_S)
        if path:
            self._commands.unmount_all(path)
        self._forget(volume_id)

    def resize(self, volume_id: str, size_bytes: int) -> None:
        """Do nothing: the server reports the size, from its quota."""

    def stats(self, volume_id: str) -> Stats:
        """See Mounter. The mount is touched only if its server answers; else the last figures are returned."""
        known = self.get(volume_id)
        there = mountinfo.read().at(known.spec.mountpoint) if known else None
        if known is None or there is None:
            return Stats(0, 0, 0, 0, "", "it is not mounted")
        how = f"mounted by the kernel's NFS client, version {option(there, 'vers')}"
        none = Stats(known.spec.capacity_bytes or LARGEST_BYTES, 0, 0, 0, how)
        last = self._shown.get(volume_id, none)
        trouble = silent(there)
        if trouble:
            return last._replace(trouble=trouble)
        try:
            shown = _parsed(self._stat(known.spec.mountpoint), how)
        except (MountFailed, CommandTimeout, ValueError) as error:
            return last._replace(trouble=str(error))
        self._shown[volume_id] = shown
        return shown

    def metrics(self) -> list[Sample]:
        """See Mounter. The samples are whether each server answers, and the kernel's counts of bytes."""
        table = mountinfo.read()
        found = [(volume, table.at(volume.spec.mountpoint)) for volume in map(self.get, self.volumes()) if volume]
        mounted = [(volume, there) for volume, there in found if there is not None and there.fstype in FSTYPES]
        with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="ping") as pool:
            answers = list(pool.map(silent, [there for _, there in mounted]))
        counted = transferred(MOUNTSTATS.read_text()) if mounted else {}
        samples: list[Sample] = []
        for (volume, there), trouble in zip(mounted, answers, strict=True):
            of = {"volume": volume.volume_id}
            samples.append(("datastore_mount_up", of, float(not trouble)))
            received, sent = counted.get(there.mountpoint, (0, 0))
            samples.append(("datastore_store_received_bytes_total", {**of, "method": "nfs"}, float(received)))
            samples.append(("datastore_store_sent_bytes_total", {**of, "method": "nfs"}, float(sent)))
        return samples

    def _mount(self, spec: MountSpec) -> str:
        output = self._commands.run(
            nfsmount.COMMAND,
            place=spec.mountpoint,
            given=nfsmount.request(spec, from_here=False).encode(),
            timeout_s=MOUNT_TIMEOUT_S,
            environment=_ENVIRONMENT,
        )
        return nfsmount.version_in(output)

    def _is_stale(self, spec: MountSpec) -> bool:
        """Return whether the mounted export's handle is stale (ESTALE). Errors: Unreachable."""
        there = mountinfo.read().at(spec.mountpoint)
        if there is not None and (trouble := silent(there)):
            raise Unreachable(trouble)
        try:
            self._stat(spec.mountpoint)
        except MountFailed as error:
            return os.strerror(errno.ESTALE) in str(error)
        except CommandTimeout as error:
            raise Unreachable(str(error)) from None
        return False

    def _stat(self, path: str) -> bytes:
        command = ["stat", "--file-system", "--format=%S %b %f %c %d", "--", path]
        return self._commands.run(command, place=path, timeout_s=STAT_TIMEOUT_S)

    def _has_nfs(self) -> bool:
        """Return whether the kernel has NFS, after trying to load the module."""
        if in_this_kernel():
            return True
        now = time.monotonic()
        if now >= self._missing_until_s:
            self._missing_until_s = now + MISSING_AGAIN_S
            with suppress(DatastoreError):  # the kernel has no NFS, or the command took too long
                command = [sys.executable, "-m", "datastore.nfsclient"]
                self._commands.run(command, place="the kernel's NFS client", environment=_ENVIRONMENT)
                return True
        return in_this_kernel()

    def _note(self, mount: MountedVolume) -> None:
        """Write the file that says to which volume a mount belongs. Errors: MountFailed."""
        document = {"volume": mount.volume_id, "spec": mount.spec.to_json(), "ephemeral": mount.ephemeral}
        path = self._path(mount.volume_id)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, document)
        except OSError as error:
            raise MountFailed(f"can't write to {path.parent}: {error.strerror}") from error
        with self._lock:
            self._mounts[mount.volume_id] = mount

    def _forget(self, volume_id: str) -> None:
        with self._lock:
            self._mounts.pop(volume_id, None)
        self._shown.pop(volume_id, None)
        self._path(volume_id).unlink(missing_ok=True)

    def _path(self, volume_id: str) -> Path:
        return self._directory / f"{key_of(volume_id)}.json"


def transferred(text: str) -> dict[str, tuple[int, int]]:
    """Parse /proc/self/mountstats; return the bytes received and sent by each NFS mount, by mount point. Pure."""
    found: dict[str, tuple[int, int]] = {}
    mountpoint = ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("device ") and len(words) >= 8:
            mountpoint = words[4] if words[7] in FSTYPES else ""
        elif mountpoint and words[:1] == ["bytes:"] and len(words) >= 7:
            found[mountpoint] = (int(words[5]), int(words[6]))
    return found


def _location(spec: MountSpec) -> NFSLocation:
    if not isinstance(spec.source, NFSLocation):
        raise InvalidManifest(f"{spec.source} is no NFS export")
    return spec.source


def _there(spec: MountSpec) -> bool:
    """Return whether the export is mounted where the specification says."""
    there = mountinfo.read().at(spec.mountpoint)
    return there is not None and there.fstype in FSTYPES and there.source == device_of(_location(spec))


def _parsed(output: bytes, how: str) -> Stats:
    """Parse the output of stat(1). Errors: ValueError."""
    size, blocks, free, files, files_free = (int(word) for word in output.split())
    return Stats(size * blocks, size * (blocks - free), files, files - files_free, how)
