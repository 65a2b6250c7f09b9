"""Mounts of NFS exports by the kernel's own client, as root, where the kernel has one. No process of ours serves them.

A process that touches such a mount waits in the kernel while the mount's server is away. So only child processes, which
may be left behind, touch one here, and before them the server is asked over a connection of our own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from datastore import mountinfo, nfsclient, nfsmount, ourprocess
from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation
from datastore.errors import MountFailed
from datastore.mounting import mounttable
from datastore.mounting.signals import SignalWatch

MOUNT_TIMEOUT_S = 45.0
"""Long enough to try all NFS versions, one after the other."""
POLL_S = 0.05
KILLED_TIMEOUT_S = 5.0


def mounts(spec: MountSpec) -> bool:
    """Return whether the kernel is to make this mount: it is an export, is_used(), and nothing is requested that only
    our own server has (another transport, metrics)."""
    return isinstance(spec.source, NFSLocation) and spec.transport == "kernel" and not spec.metrics and is_used()


def is_used() -> bool:
    """Return whether the kernel makes mounts of exports: we are root, and it has an NFS client."""
    return os.geteuid() == 0 and (nfsclient.in_this_kernel() or nfsclient.loaded())


def mount(spec: MountSpec, watch: SignalWatch) -> None:
    """Mount an export. Errors: DatastoreError, Interrupted, both with nothing left mounted."""
    try:
        nfsmount.version_in(_run(nfsmount.COMMAND, nfsmount.request(spec, from_here=True), MOUNT_TIMEOUT_S, watch))
    except BaseException:
        if mounttable.mounted_at(spec.mountpoint):
            mounttable.detach(spec.mountpoint)
        raise


def unmount(mountpoint: str, *, force: bool, timeout_s: float, watch: SignalWatch | None) -> None:
    """Send what programs wrote to the server, and unmount. force: if that fails, or the server is away, detach instead;
    data that the server lacks then stays in the kernel's memory until the server is back. Errors: MountFailed."""
    there = mounttable.mounted_at(mountpoint)
    if there is None or there.fstype not in nfsclient.FSTYPES:
        return
    why = nfsclient.silent(there)
    if not why:
        try:
            _run(["umount", "-c", "-i", "--", mountpoint], "", timeout_s, watch)
        except MountFailed as error:
            why = str(error)
        else:
            return
    if not force:
        raise MountFailed(f"{mountpoint}: {why}; `datastore umount --force {mountpoint}` detaches it anyway")
    mounttable.detach(mountpoint)


def storage(mountpoint: str) -> dict[str, object] | None:
    """Ask the server of a mount; return why it does not answer, in the form of a status; None when it answers. How long
    it has been away is not known, because it is not watched."""
    there = mountinfo.read().at(mountpoint)
    why = nfsclient.silent(there) if there is not None and there.fstype in nfsclient.FSTYPES else ""
    return {"lastAsked": time.time(), "error": why} if why else None


def version(mountpoint: str) -> str:
    """Return the NFS version of the mount at a path, or ''."""
    there = mountinfo.read().at(mountpoint)
    return nfsclient.option(there, "vers") if there is not None else ""


def _run(command: Sequence[str], given: str, timeout_s: float, watch: SignalWatch | None) -> str:
    """Run a program and return its output. A program that hangs in the kernel and can't be killed is left behind.
    Errors: MountFailed when the program fails, or does not end in time; Interrupted."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONPATH": ourprocess.module_path()},
    )
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                output, said = process.communicate(given, timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                given = ""
                if watch is not None:
                    watch.check()
                if time.monotonic() > deadline:
                    raise MountFailed(f"{command[0]} did not end within {timeout_s:.0f} s") from None
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Until it is dead, it may still mount something.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILLED_TIMEOUT_S)
        raise
    if process.returncode:
        raise MountFailed(said.strip().splitlines()[-1] if said.strip() else f"{command[0]}: {process.returncode}")
    return output
