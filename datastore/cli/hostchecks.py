"""Checks of what a machine needs for mounts: kernel, /dev/fuse, fusermount3, packages, disk space, no dead mounts.

Most checks take the fact, or the path to read it from, as an argument, so that tests can choose it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from datastore import mountinfo
from datastore.cli.exitcodes import ExitCode
from datastore.cli.findings import Finding, bad, ok, warn
from datastore.cli.inspection import CRASHED, HANGING, UNMOUNTED, inspect
from datastore.mounting.records import all_records
from datastore.units import format_size

FAST_KERNEL = (6, 9)
"""FUSE passthrough and FUSE_NOTIFY_RESEND came with Linux 6.9."""
OLDEST_KERNEL = (5, 4)
"""Linux 5.4 has FUSE protocol 7.31; max_pages (requests of 1 MiB) came with Linux 4.20."""
ANSWER_S = 2.0
"""How long a mount may take to answer a statfs; a live mount answers from memory."""
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
PACKAGES = ("botocore", "isal", "pydantic", "rich", "typer", "yaml")


def host_checks(cache_dir: Path, cache_size_bytes: int) -> Iterator[Finding]:
    """Run all checks of this machine. The network is used only to ping the servers of the kernel's NFS mounts."""
    yield check_packages()
    if sys.platform.startswith("linux"):
        plain = os.geteuid() != 0
        yield check_kernel(os.uname().release)
        yield check_device(Path("/dev/fuse"), plain=plain)
        yield check_fusermount(shutil.which("fusermount3"), plain=plain)
        yield check_allow_other(Path("/etc/fuse.conf"))
    else:
        yield check_libfuse(find_spec("mfusepy") is not None)
    yield check_disk(cache_dir, cache_size_bytes)
    yield from check_mounts()


def check_packages() -> Finding:
    """Check that the libraries the mount server needs are installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        return bad("packages", f"missing: {', '.join(missing)}", "install kube-datastore again with pip or pipx")
    return ok("packages", f"Python {sys.version.split()[0]}, all libraries are there")


def check_kernel(release: str) -> Finding:
    """Check by the kernel's version what its FUSE can do."""
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST_KERNEL:
        return bad("kernel", f"Linux {release} is too old", "use Linux 5.4 or newer", ExitCode.MOUNT)
    if version < FAST_KERNEL:
        todo = "with Linux 6.9 or newer cached reads are faster, and no call fails when a mount's server dies"
        return warn("kernel", f"Linux {release} has no FUSE passthrough and no resend", todo)
    return ok("kernel", f"Linux {release}: FUSE passthrough and resend")


def check_device(device: Path, *, plain: bool) -> Finding:
    """Check that /dev/fuse is there, and who may open it. plain: this user is not root."""
    try:
        mode = stat.S_IMODE(device.stat().st_mode)
    except OSError:
        todo = "modprobe fuse; in a container: run it with --device /dev/fuse --cap-add SYS_ADMIN"
        return bad("/dev/fuse", "is missing", todo, ExitCode.MOUNT)
    usable = os.access(device, os.R_OK | os.W_OK)
    todo = f"as root: chmod 666 {device}"
    if not usable:
        return bad("/dev/fuse", f"has mode {mode:04o}: this user can't open it", todo, ExitCode.MOUNT)
    if mode & 0o666 != 0o666 and not plain:
        return warn("/dev/fuse", f"has mode {mode:04o}: root can mount, plain users can't", todo)
    return ok("/dev/fuse", f"mode {mode:04o}")


def check_fusermount(program: str | None, *, plain: bool) -> Finding:
    """Check the setuid program that plain users need to mount; root does not need it. plain: this user is not root."""
    todo = "install fuse3 (apt install fuse3, dnf install fuse3)"
    if program is None:
        if plain:
            return bad("fusermount3", "is not installed, and only root can mount without it", todo, ExitCode.MOUNT)
        return warn("fusermount3", "is not installed: root can mount, plain users can't", todo)
    if not Path(program).stat().st_mode & stat.S_ISUID:
        text = f"{program} is not setuid root: plain users can't mount"
        todo = f"as root: chmod u+s {program}"
        return bad("fusermount3", text, todo, ExitCode.MOUNT) if plain else warn("fusermount3", text, todo)
    return ok("fusermount3", program)


def check_allow_other(config: Path) -> Finding:
    """Check whether plain users may use --allow-other."""
    try:
        allowed = any(line.strip() == "user_allow_other" for line in config.read_text(errors="replace").splitlines())
    except OSError:
        allowed = False
    if allowed:
        return ok("allow_other", f"{config} has user_allow_other")
    # Not a warning: its absence is the safe default, and only --allow-other needs user_allow_other.
    return ok("allow_other", f"{config} has no user_allow_other: --allow-other is for root only")


def check_libfuse(installed: bool) -> Finding:
    """Check for mfusepy, as outside Linux a mount goes through libfuse."""
    if not installed:
        todo = "pip install 'kube-datastore[libfuse]', and install macFUSE or FUSE-T"
        return bad("libfuse", "mfusepy is not installed", todo, ExitCode.MOUNT)
    return ok("libfuse", "mfusepy is there; it needs macFUSE or FUSE-T")


def check_disk(cache_dir: Path, wanted_bytes: int) -> Finding:
    """Check that the cache directory can be written and its disk has the room that the cache may take."""
    place = next(each for each in (cache_dir, *cache_dir.parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    text = f"{format_size(free)} free for {cache_dir}, which may take {format_size(wanted_bytes)}"
    if not os.access(place, os.W_OK | os.X_OK):
        todo = "set spec.cache.dir to a directory of yours"
        return bad("cache", f"{place} can't be written by this user", todo, ExitCode.MOUNT)
    if free < wanted_bytes:
        return warn("cache", text, "free some space, or set spec.cache.size or spec.cache.dir")
    return ok("cache", text)


def check_mounts() -> Iterator[Finding]:
    """Check for mounts that crashed, hang or have no record of this user, and for files that are not uploaded."""
    records = all_records()
    for record in records:
        seen = inspect(record)
        place = f"{record.name} at {record.mountpoint}"
        if seen["state"] in (CRASHED, HANGING):
            force = " --force" if seen["state"] == HANGING else ""
            todo = f"datastore umount{force} {record.mountpoint}, then mount it again: what was not uploaded is kept"
            yield bad("mount", f"{place}: {seen['state']}", todo, ExitCode.MOUNT)
        failed = [each for each in seen["dirty"] if each.get("error")]
        if failed or (seen["dirty"] and seen["state"] == UNMOUNTED):
            text = f"{place}: {len(failed) or len(seen['dirty'])} files are not uploaded"
            todo = f"datastore status {record.mountpoint} says why; mounting it again there uploads them"
            yield bad("mount", text, todo, ExitCode.UNSYNCED)
    known = {record.mountpoint for record in records}
    for orphan in mountinfo.read().mounts:
        if orphan.fstype == mountinfo.FSTYPE and orphan.mountpoint not in known:
            yield check_orphan(orphan.mountpoint)
    if not records:
        yield ok("mount", "nothing is mounted by this user")


def check_orphan(mountpoint: str) -> Finding:
    """Check a Datastore mount without a record of this user: another user's, or one whose state directory is gone."""
    text = f"{mountpoint}: a Datastore mount that this user has no record of"
    error = _error_of(mountpoint)
    if error == 0:
        return ok("mount", f"{text}; it is alive")
    if error == errno.EACCES:
        return ok("mount", f"{text}; it is another user's")
    why = "it does not answer" if error is None else os.strerror(error)
    dead = "it is dead: " if error in _DEAD else ""
    return warn("mount", f"{text}; {dead}{why}", f"if nobody needs it: datastore umount --force {mountpoint}")


def _error_of(mountpoint: str) -> int | None:
    """Return the errno of a statvfs of a mount, 0 when it succeeds, None when no answer came within ANSWER_S."""
    seen: list[int] = []

    def look() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as error:
            seen.append(error.errno or errno.EIO)
        else:
            seen.append(0)

    # statvfs of a mount that hangs does not return: a daemon thread calls it, which the command need not wait for.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(ANSWER_S)
    return seen[0] if seen else None
