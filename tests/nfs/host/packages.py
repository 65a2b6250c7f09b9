"""The guests' Debian packages, unpacked into the tools' cache: nothing of them is installed on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.servers import ServerMissing, tools_dir

PACKAGES = (
    "kmod",
    "libtirpc-common",
    "netbase",
    "nfs-ganesha",
    "nfs-ganesha-vfs",
    "nfs-kernel-server",
    "openssh-server",
    "rpcbind",
    "user-mode-linux",
    "xfsprogs",
)
APT = Path(__file__).resolve().parents[3] / ".ci/apt"
FETCH_TIMEOUT_S = 600.0
ATTEMPTS, PAUSE_S = 3, 10.0
LAYOUT = "1"
"""Of what unpack() leaves; another one is fetched anew."""


def absent(needed: Mapping[str, str]) -> str:
    """Install the packages of programs that are missing; why that did not help, or ''. needed: package by program."""
    missing = [package for program, package in needed.items() if shutil.which(program) is None]
    if missing:
        subprocess.run([APT, *missing], check=False, timeout=FETCH_TIMEOUT_S)
    left = [program for program in needed if shutil.which(program) is None]
    return f"missing: {', '.join(left)}" if left else ""


def unpacked() -> Path:
    """The directory with the packages' usr/ and etc/; fetched if it is not there yet. Errors: ServerMissing."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    name = hashlib.sha256("\0".join((LAYOUT, release, *PACKAGES)).encode()).hexdigest()[:12]
    place = tools_dir().parent / f"nfs-guest-{name}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "nfs-guest.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            with tempfile.TemporaryDirectory(prefix="nfs-guest-", dir=place.parent) as scratch:
                _fetch(Path(scratch))
                _unpack(Path(scratch)).rename(place)
    return place


def _fetch(scratch: Path) -> None:
    if shutil.which("apt-get") is None:
        raise ServerMissing("the NFS host is made of Debian's packages, and there is no apt-get here")
    archives = scratch / "archives"
    (archives / "partial").mkdir(parents=True)
    command = [
        *("apt-get", "install", "--yes", "--quiet=2", "--download-only", "--reinstall", "--no-install-recommends"),
        *("-o", f"Dir::Cache::archives={archives}", "-o", "DPkg::Lock::Timeout=120", "-o", "APT::Sandbox::User=root"),
        *("-o", "Acquire::Retries=3"),
        *PACKAGES,
    ]
    done = _run(command)
    for _ in range(ATTEMPTS):
        if done.returncode == 0:
            return
        if _run(["apt-get", "update", "--quiet=2"]).returncode:  # a fresh machine has no lists yet
            time.sleep(PAUSE_S)  # while others update them, they can't be read either
        done = _run(command)
    if done.returncode:
        raise ServerMissing(f"apt-get could not fetch the NFS host's packages: {done.stdout.strip()[-500:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FETCH_TIMEOUT_S,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        check=False,
    )


def _unpack(scratch: Path) -> Path:
    root = scratch / "root"
    for archive in sorted((scratch / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "--extract", archive, root], check=True, timeout=FETCH_TIMEOUT_S)
    for name in ("bin", "sbin", "lib"):  # a merged /usr, as Debian's installer makes it
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("insmod", "modprobe", "rmmod"):  # Debian's are absolute links, which mean nothing outside of a root
        (root / "usr/sbin" / name).unlink(missing_ok=True)
        (root / "usr/sbin" / name).symlink_to("../bin/kmod")
    (root / "usr/lib/modules").symlink_to("uml/modules")
    return root
