"""Finds free GPUs of this machine and reserves them, so that users need not agree on who uses which.

A GPU is reserved by an flock on its file, which all users of the machine share; the kernel releases the lock when the
process that holds it ends, in any way. A GPU that a program uses without a lock is busy too: NVML shows its processes.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datastore import nvml
from datastore.errors import DatastoreError

LOCK_PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108  (the first that all users may write to)
BUSY_MEMORY_BYTES = 1 << 30
"""A GPU with this much memory in use is busy: processes in other containers may not show. A context has some 500 MB."""
_LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. index: as in nvidia-smi, and in CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID. used_by: '' when it is free."""

    index: int
    uuid: str
    name: str = ""
    used_by: str = ""


@dataclass(slots=True)
class Claim:
    """GPUs that are reserved for us, by task, and the descriptors of their locks; the owner must call release()."""

    by_task: dict[str, list[Gpu]] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Give the GPUs back. Idempotent."""
        while self.locks:
            os.close(self.locks.pop())


class NotFree(DatastoreError):
    """Too few GPUs are free now; later there may be enough."""


class TooFew(DatastoreError):
    """This machine has fewer GPUs than the job needs."""


def devices() -> list[Gpu]:
    """Return all GPUs that NVML lists; [] where there is no driver."""
    with nvml.driver() as driver:
        return [_described(driver, index) for index in range(driver.nvmlDeviceGetCount())] if driver else []


def claim(wanted: Mapping[str, int], found: list[Gpu] | None = None, locks: Path | None = None) -> Claim:
    """Reserve the wanted number of free GPUs for each task, all or none. Errors: TooFew, NotFree.
    found, locks: the GPUs of the machine and the directory of the lock files, if not the real ones."""
    needed = sum(wanted.values())
    claimed = Claim()
    if not needed:
        return claimed
    there = devices() if found is None else found
    if needed > len(there):
        raise TooFew(f"it needs {needed} GPUs, and this machine has {len(there)}")
    free: list[Gpu] = []
    taken: list[str] = []
    for gpu in there:
        if len(free) == needed:
            break
        lock, holder = _lock(gpu, locks or _lock_place()) if not gpu.used_by else (None, gpu.used_by)
        if lock is None:
            taken.append(f"GPU {gpu.index} is used by {holder}")
        else:
            claimed.locks.append(lock)
            free.append(gpu)
    if len(free) < needed:
        claimed.release()
        raise NotFree(f"it needs {needed} GPUs, and {len(free)} of {len(there)} are free: {'; '.join(taken)}")
    for task, count in wanted.items():
        claimed.by_task[task], free = free[:count], free[count:]
    return claimed


def variables(gpus: list[Gpu]) -> dict[str, str]:
    """Return the variables that make CUDA see only these GPUs; with [], CUDA sees no GPU."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(each.index) for each in gpus),
    }


def load(gpus: list[Gpu]) -> tuple[float, int] | None:
    """Return the sum of the GPUs' utilisation in percent, and their memory in use in bytes; None if NVML can't tell."""
    if not gpus:
        return None
    with nvml.driver() as driver:
        if driver is None:
            return None
        with suppress(driver.NVMLError):
            handles = [driver.nvmlDeviceGetHandleByIndex(each.index) for each in gpus]
            percent = sum(float(driver.nvmlDeviceGetUtilizationRates(each).gpu) for each in handles)
            return percent, sum(nvml.memory_used(driver, each) for each in handles)
    return None


def _described(driver: Any, index: int) -> Gpu:
    handle = driver.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=driver.nvmlDeviceGetUUID(handle),
        name=driver.nvmlDeviceGetName(handle),
        used_by=_used_by(driver, handle),
    )


def _used_by(driver: Any, handle: object) -> str:
    running = driver.nvmlDeviceGetComputeRunningProcesses(handle)
    if running:
        return f"pid {running[0].pid}{_user_of(running[0].pid)}"
    memory = nvml.memory_used(driver, handle)
    return f"somebody whose {memory >> 20} MiB it holds" if memory >= BUSY_MEMORY_BYTES else ""


def _lock_place() -> Path:
    for place in LOCK_PLACES:
        with suppress(OSError):
            if stat.S_IMODE(os.stat(place).st_mode) == 0o1777:
                return Path(place)
    raise DatastoreError(f"none of {', '.join(LOCK_PLACES)} is open to all users, where the locks of GPUs could be")


def _lock(gpu: Gpu, place: Path) -> tuple[int | None, str]:
    """Return the lock's descriptor, or None and the lock's holder. The file belongs to the user who created it."""
    path = place / f"datastore-{gpu.uuid}.lock"
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(path, flags)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444))
        lock = os.open(path, flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        inode = os.fstat(lock).st_ino
        os.close(lock)
        return None, _holder(inode)
    return lock, ""


def _holder(inode: int) -> str:
    """Return who holds the lock on the file with this inode number, from /proc/locks."""
    with suppress(OSError, ValueError):
        for line in _LOCKS.read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                return f"another job (pid {words[4]}{_user_of(int(words[4]))})"
    return "another job"


def _user_of(pid: int) -> str:
    with suppress(OSError):
        return f", user {Path(f'/proc/{pid}').owner()}"
    return ""
