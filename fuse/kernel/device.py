"""Mounts and unmounts without libfuse: as root with mount(2) and /dev/fuse, as a plain user through fusermount3.

Every refusal raises MountFailed with one line that says what to do. Every subprocess has a timeout.
Sources: mount(2), umount2(2), fusermount3(1); libfuse's lib/mount.c, which passes the device over _FUSE_COMMFD.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from datastore import mountinfo
from datastore.errors import MountFailed

from . import abi

DEVICE = "/dev/fuse"
FUSE_CONF = Path("/etc/fuse.conf")
SUBTYPE = "datastore"
FUSERMOUNT_TIMEOUT_S = 60.0
BUSY_RETRY_S, BUSY_POLL_S = 2.0, 0.1
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND = 1, 2, 4, 4096
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
MAX_READ = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
READ_AHEAD_KB = 1024  # measured best of 128, 1024, 4096 for one sequential reader (docs/decisions)


def canonical(mountpoint: str) -> str:
    """Return the absolute path as mountinfo has it. The last component is not accessed: a dead mount may be there."""
    absolute = os.path.abspath(mountpoint)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def check_mountpoint(place: str) -> None:
    """Errors: MountFailed when something is mounted there, or it is no directory, not empty or not writable for us."""
    there = mountinfo.read().at(canonical(place))
    if there is not None:
        raise MountFailed(f"{place} is already a mount of {there.source} ({there.fstype}); unmount it first")
    try:
        status = os.stat(place)
        if not stat.S_ISDIR(status.st_mode):
            raise MountFailed(f"{place} is not a directory")
        entries = os.listdir(place)
    except FileNotFoundError:
        raise MountFailed(f"{place} does not exist; create the directory first") from None
    except OSError as error:
        raise MountFailed(f"can't look into {place}: {error.strerror}") from error
    if entries:
        raise MountFailed(f"{place} is not empty; its files would be hidden. Choose an empty directory")
    if os.geteuid() and not os.access(place, os.W_OK):
        raise MountFailed(f"{place} is not writable for you; fusermount3 mounts only on a directory you may write to")


def is_mounted(mountpoint: str) -> bool:
    """Return whether anything is mounted exactly there."""
    return mountinfo.read().at(canonical(mountpoint)) is not None


def check_device() -> None:
    """Errors: MountFailed when /dev/fuse is missing or may not be opened."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise MountFailed(
            f"{DEVICE} is missing; load the module (modprobe fuse) or give the container the device"
        ) from None
    except PermissionError:
        raise MountFailed(f"{DEVICE} may not be opened by you; as root: chmod 0666 {DEVICE}") from None
    except OSError as error:
        raise MountFailed(f"{DEVICE} can't be opened: {error.strerror}; load the module (modprobe fuse)") from error


def mount(place: str, name: str, *, read_only: bool = False, allow_other: bool = False) -> int:
    """Mount, and return the descriptor of the connection to the kernel, which ends when its last copy is closed.
    name: shown as the mount's source. allow_other: give other users access too, as a mount by root always does; the
    kernel checks the modes. Errors: MountFailed."""
    check_mountpoint(place)
    check_device()
    if os.geteuid() == 0:
        return _mount_as_root(place, name, read_only)
    return _mount_by_fusermount(place, name, read_only, allow_other)


def _mount_as_root(place: str, name: str, read_only: bool) -> int:
    device_fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    data = f"fd={device_fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={MAX_READ}"
    target, source = os.fsencode(place), name.encode()
    if _LIBC.mount(source, target, f"fuse.{SUBTYPE}".encode(), ctypes.c_ulong(flags), data.encode()):
        number = ctypes.get_errno()
        os.close(device_fd)
        hint = "; the process needs CAP_SYS_ADMIN" if number == errno.EPERM else ""
        raise MountFailed(f"the kernel refused to mount at {place}: {os.strerror(number)}{hint}")
    return device_fd


def clone(device_fd: int) -> int:
    """Return another descriptor of the same connection to the kernel. When its last copy is closed, the requests that
    were read from it end with ECONNABORTED; those read from others go on (fuse_dev_release()). Errors: MountFailed."""
    cloned = -1
    try:
        cloned = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(cloned, abi.IOC_CLONE, abi.DEVICE_FD.pack(device_fd))
    except OSError as error:
        if cloned >= 0:
            os.close(cloned)
        raise MountFailed(f"{DEVICE} gives no second descriptor of the mount: {error.strerror}") from error
    return cloned


def bind(directory: str, mountpoint: str) -> None:
    """Bind-mount `directory` at the mount point too, without accessing either; root only. Errors: MountFailed."""
    if _LIBC.mount(os.fsencode(directory), os.fsencode(mountpoint), None, ctypes.c_ulong(MS_BIND), None):
        number = ctypes.get_errno()
        raise MountFailed(f"the kernel refused to bind {directory} to {mountpoint}: {os.strerror(number)}")


def _mount_by_fusermount(place: str, name: str, read_only: bool, allow_other: bool) -> int:
    program = _fusermount()
    if allow_other and not _user_allow_other():
        raise MountFailed(f"allow_other needs the line user_allow_other in {FUSE_CONF}; root has to add it")
    listed = ["ro" if read_only else "rw", "nosuid", "nodev", "default_permissions", f"max_read={MAX_READ}"]
    listed += [f"fsname={_quoted(name)}", f"subtype={SUBTYPE}"] + ["allow_other"] * allow_other
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        command, fd = [program, "-o", ",".join(listed), "--", place], theirs.fileno()
        finished = _run(command, pass_fds=(fd,), _FUSE_COMMFD=str(fd))
        if finished.returncode:
            raise MountFailed(f"fusermount3 refused to mount at {place}: {_first_line(finished.stderr)}")
        theirs.close()  # fusermount3 has ended: without a copy of the other end, recv_fds() can't block
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise MountFailed("fusermount3 gave no device descriptor")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _quoted(name: str) -> str:
    """Escape a name for fusermount3's option list: a backslash goes before each comma and each backslash."""
    return name.replace("\\", "\\\\").replace(",", "\\,")


def _user_allow_other() -> bool:
    with suppress(OSError):
        return "user_allow_other" in map(str.strip, FUSE_CONF.read_text().splitlines())
    return False


def _fusermount() -> str:
    program = shutil.which("fusermount3")
    if program is None:
        raise MountFailed("fusermount3 is not installed, and only root mounts without it: apt-get install fuse3")
    return program


def _run(command: list[str], pass_fds: tuple[int, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FUSERMOUNT_TIMEOUT_S,
            pass_fds=pass_fds,
            env={**os.environ, "LC_ALL": "C", **more},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MountFailed(f"{command[0]} gave no answer in {FUSERMOUNT_TIMEOUT_S:.0f} s") from None


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it gave no reason"])[0].removeprefix("fusermount3: ")


class Busy(MountFailed):
    """The mount is in use; the text says by whom."""


class _UserNotFound(Busy):
    """The mount is in use, but no process that uses it can be found. One that only looks, as `df` does, soon ends."""


def unmount(mountpoint: str, *, lazy: bool = False, retry_s: float = BUSY_RETRY_S) -> None:
    """Unmount; succeed when nothing is mounted there. lazy: detach the mount now; it ends when nobody uses it any more.
    While the mount is in use by a process that can't be found, retry for retry_s at most. Errors: Busy, MountFailed."""
    place = canonical(mountpoint)
    until = time.monotonic() + retry_s
    while True:
        last = time.monotonic() >= until  # set before the try: the search for its user may take longer than retry_s
        try:
            return _unmount(place, lazy)
        except _UserNotFound:
            if last:
                raise
        time.sleep(BUSY_POLL_S)


def unmount_or_detach(mountpoint: str, *, force: bool, detach: bool) -> str:
    """Unmount and return '', or, if that fails, detach the mount and return why. force: try once, and detach after any
    failure; detach: detach only a mount that is in use. Errors: Busy, MountFailed."""
    try:
        unmount(mountpoint, retry_s=0.0 if force else BUSY_RETRY_S)
    except MountFailed as error:
        if not (force or (detach and isinstance(error, Busy))):
            raise
        unmount(mountpoint, lazy=True)
        return str(error)
    return ""


def _unmount(place: str, lazy: bool) -> None:
    if sys.platform != "linux":
        _unmount_by(["umount", *(["-f"] if lazy else []), place], place)
    elif mountinfo.read().at(place) is None:
        return
    elif os.geteuid() == 0:
        _unmount_as_root(place, MNT_DETACH if lazy else 0)
    else:
        _unmount_by([_fusermount(), "-u", *(["-z"] if lazy else []), "--", place], place)


def _unmount_as_root(place: str, flags: int) -> None:
    if not _LIBC.umount2(os.fsencode(place), flags | UMOUNT_NOFOLLOW):
        return
    number = ctypes.get_errno()
    if number == errno.EBUSY:
        raise busy(place)
    if number != errno.EINVAL:  # EINVAL: nothing is mounted there any more
        raise MountFailed(f"can't unmount {place}: {os.strerror(number)}")


def _unmount_by(command: list[str], place: str) -> None:
    finished = _run(command)
    if finished.returncode and (sys.platform != "linux" or mountinfo.read().at(place)):  # else it is gone by now
        reason = _first_line(finished.stderr)
        if "busy" in reason.lower():
            raise busy(place)
        raise MountFailed(f"can't unmount {place}: {reason}")


def busy(place: str) -> Busy:
    """Return the error that says, for people to read, what keeps the mount at `place` busy."""
    below = [each.mountpoint for each in mountinfo.read().mounts if each.mountpoint.startswith(f"{place}/")]
    if below:
        return Busy(f"{place} is busy: {below[-1]} is mounted below it; unmount that first")
    if sys.platform == "linux" and (found := users(place)):
        return Busy(f"{place} is busy: used by {', '.join(found)}; close its files, and leave it in each shell (cd /)")
    return _UserNotFound(f"{place} is busy: used by a process of another user")


def _uses(process: Path, mountpoint: str) -> bool:
    below = mountpoint.rstrip("/") + "/"
    links = [process / "cwd", process / "root", process / "exe"]
    with suppress(OSError):  # another user's process, or it has just ended
        links += (process / "fd").iterdir()
    for link in links:
        with suppress(OSError):
            if f"{os.readlink(link)}/".startswith(below):
                return True
    with suppress(OSError):
        return f" {below}" in (process / "maps").read_text(errors="surrogateescape")
    return False


def users(mountpoint: str, proc: Path = Path("/proc")) -> list[str]:
    """Return the processes that have a file, directory or mapping below the mountpoint, each as `pid N (command)`. They
    are found in /proc (proc(5)), as far as we may look, without touching the mount: a dead or busy one could hang."""
    return [_named(process) for process in _processes(proc) if _uses(process, mountpoint)]


def seen_elsewhere(number: str, proc: Path = Path("/proc")) -> list[str]:
    """Return a process of each other mount namespace in which a file system is mounted, as users() does. number: the
    file system's major:minor. Such a namespace has copies of the mounts that there were when it was made; where mounts
    are private (mount_namespaces(7)), as in most containers, an unmount does not reach it."""
    found = dict[str, str]()
    for process in _processes(proc):
        with suppress(OSError):
            table = mountinfo.parse(os.fsdecode((process / "mountinfo").read_bytes()))
            if any(mount.device == number for mount in table.mounts):
                found.setdefault(os.readlink(process / "ns/mnt"), _named(process))
    return list(found.values())


def _processes(proc: Path) -> list[Path]:
    return sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name))


def _named(process: Path) -> str:
    try:
        command = (process / "comm").read_text(errors="replace").strip()
    except OSError:
        command = "ended"
    return f"pid {process.name} ({command})"


def tune_read_ahead(mountpoint: str) -> None:
    """Let the kernel read ahead by READ_AHEAD_KB. Only root may set that; a failure costs nothing but speed."""
    there = mountinfo.read().at(canonical(mountpoint))
    if there is not None:
        with suppress(OSError):
            Path(f"/sys/class/bdi/{there.device}/read_ahead_kb").write_text(str(READ_AHEAD_KB))
