"""An export mounted by the kernel's own NFS client: by root, where the kernel has one. No process of ours serves it.

Who touches such a mount waits in the kernel for as long as its server is away. So nothing here does but programs that
may be left behind, and before that the server is asked over a connection of our own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from datastore import mountinfo, nfsclient, ourprocess
from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation, document_of
from datastore.errors import MountFailed, error_named
from datastore.mounting import mounttable
from datastore.mounting.signals import SignalWatch

MOUNT_TIMEOUT_S = 45.0
"""Versions are tried one after the other."""
POLL_S = 0.05
KILLED_TIMEOUT_S = 5.0
_SYS_FSOPEN = 430
"""Of the same number on every machine. It has the kernel load its module, and mounts nothing."""


def mounts(spec: MountSpec) -> bool:
    """Whether this is mounted so: an export, by root, by a kernel with a client, and none of what only our engine has
    is asked for."""
    if not isinstance(spec.source, NFSLocation) or os.geteuid() or spec.transport != "kernel" or spec.metrics:
        return False
    return nfsclient.in_this_kernel() or _loaded()


def _loaded() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    descriptor = ctypes.CDLL(None).syscall(_SYS_FSOPEN, b"nfs", 1)
    if descriptor >= 0:
        os.close(descriptor)
    return bool(descriptor >= 0)


def mount(spec: MountSpec, watch: SignalWatch) -> None:
    """Errors: why it can't be mounted; Interrupted. Then nothing is mounted."""
    asked = {
        "source": document_of(spec.source),
        "mountpoint": spec.mountpoint,
        "readOnly": spec.read_only,
        "metadataTTL": spec.metadata_ttl_s,
        "fromHere": True,
    }
    command = [sys.executable, "-m", "datastore.nfsmount"]
    try:
        output = _run(command, json.dumps(asked), MOUNT_TIMEOUT_S, watch)
        answer = json.loads(output)
        if "error" in answer:
            raise error_named(answer["kind"], answer["error"])
    except BaseException:
        if mounttable.mounted_at(spec.mountpoint):
            mounttable.detach(spec.mountpoint)
        raise


def unmount(mountpoint: str, *, force: bool, timeout_s: float, watch: SignalWatch | None) -> None:
    """What programs wrote goes to the server first. force: otherwise too, and at once where the server is away.

    What it did not get then stays in the kernel's memory until it is back. Errors: MountFailed.
    """
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
        raise MountFailed(f"{mountpoint}: {why}; `datastore umount --force {mountpoint}` lets go of it all the same")
    mounttable.detach(mountpoint)


def storage(mountpoint: str) -> dict[str, object] | None:
    """Whether its server answers, as status has it: None when it does. Nobody watches it: since when is not known."""
    there = mountinfo.read().at(mountpoint)
    why = nfsclient.silent(there) if there is not None and there.fstype in nfsclient.FSTYPES else ""
    return {"lastAsked": time.time(), "error": why} if why else None


def version(mountpoint: str) -> str:
    """Of NFS that the kernel speaks there, or ''."""
    there = mountinfo.read().at(mountpoint)
    return nfsclient.option(there, "vers") if there is not None else ""


def _run(command: Sequence[str], given: str, timeout_s: float, watch: SignalWatch | None) -> str:
    """What a program writes. One that the kernel does not let go of is left behind.

    Errors: MountFailed when it fails, or does not end in time; Interrupted.
    """
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
        # Until then it may still mount something.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILLED_TIMEOUT_S)
        raise
    if process.returncode:
        raise MountFailed(said.strip().splitlines()[-1] if said.strip() else f"{command[0]}: {process.returncode}")
    return output
