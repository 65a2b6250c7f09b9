"""Finds and changes mounts, with system calls as root on Linux, else with the programs of the system."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

from datastore import mountinfo
from datastore.errors import MountFailed
from datastore.mountinfo import FSTYPE, MOUNTINFO, Mount

UNMOUNT_TIMEOUT_S = 10.0
MS_RDONLY, MS_REMOUNT, MS_BIND = 0x1, 0x20, 0x1000
MNT_FORCE, MNT_DETACH = 0x1, 0x2


def mounted_at(path: str) -> Mount | None:
    """Return the topmost mount exactly at an absolute path, or None. On Linux a dead mount there can't block this."""
    if not MOUNTINFO.exists():
        return Mount("", path, False, FSTYPE, "") if os.path.ismount(path) else None
    return mountinfo.read().at(path)


def end_dead(path: str) -> None:
    """Detach a dead mount; as root, end its connection too, so that no process waits forever. Errors: MountFailed."""
    if os.geteuid() == 0 and MOUNTINFO.exists():
        # MNT_FORCE ends the connection, and also unmounts if no process uses the mount: see umount(2).
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(path), ctypes.c_int(MNT_FORCE)) == 0:
            return
    detach(path)


def detach(path: str) -> None:
    """Detach a mount from the tree at once (lazily): it stays alive for open files. Errors: MountFailed."""
    if os.geteuid() == 0 and MOUNTINFO.exists():
        _umount2(path, MNT_DETACH)
        return
    whys = []
    for command in (["fusermount3", "-u", "-z", "--", path], ["umount", path]):
        if shutil.which(command[0]):
            why = _refusal(command)
            if not why:
                return
            whys.append(why)
    raise MountFailed(f"{path}: can't be unmounted: {'; '.join(whys) or 'fusermount3 is not installed'}")


def unmount_bind(path: str) -> None:
    """Undo a bind mount. Errors: MountFailed, also while files are open there."""
    _umount2(path, 0)


def bind(source: str, path: str, *, read_only: bool) -> None:
    """Bind-mount a directory at another path; root only. Errors: MountFailed."""
    _mount(source, path, MS_BIND)
    if read_only:
        try:
            _mount("none", path, MS_BIND | MS_REMOUNT | MS_RDONLY)
        except MountFailed:
            _umount2(path, MNT_DETACH)
            raise


def _refusal(command: list[str]) -> str:
    """Run a command; return '' if it succeeds, else the last line that it says."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=UNMOUNT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not ended within {UNMOUNT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"{command[0]} failed with {done.returncode}"])[-1].rstrip(".")


def _mount(source: str, path: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(path), None, ctypes.c_ulong(flags), None) != 0:
        raise MountFailed(f"{path}: the kernel refused to bind {source} there: {os.strerror(ctypes.get_errno())}")


def _umount2(path: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), ctypes.c_int(flags)) != 0:
        raise MountFailed(f"{path}: can't be unmounted: {os.strerror(ctypes.get_errno())}")
