"""The helpers that mount(8) and umount(8) call for `mount -t datastore` and `umount`, so for fstab and systemd too.

mount(8) and umount(8) find them in /sbin by their names, mount.datastore and umount.fuse.datastore; "external helpers"
and "exit status" in those manual pages describe their arguments and exit codes.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterable
from typing import NoReturn

from datastore.api.manifest import load
from datastore.cli.main import leave, run
from datastore.errors import DatastoreError
from datastore.mounting import mounttable
from datastore.mounting.directory import real_path, record_at

USAGE, FAILED = 1, 32
_USAGE_OF_OURS = 2
_FLAGS = {"ro": "--read-only", "allow_other": "--allow-other"}
_VALUES = {name: f"--{name}" for name in ("uid", "gid", "umask", "memory", "metrics", "transport")}
_NOT_OURS = {
    *("rw", "defaults", "auto", "noauto", "nofail", "_netdev", "async", "exec"),  # for fstab, or what we do anyway
    *("nodev", "nosuid"),  # true of every mount of ours
    *("atime", "noatime", "relatime", "norelatime", "diratime", "nodiratime"),  # reading never changes a file's times
}
_NOT_OURS_BEGIN = ("x-", "X-", "comment=")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with the exit code that mount(8) has for wrong usage."""
        self.exit(USAGE, f"{self.prog}: {message}\n")


def mount_arguments(file: str, directory: str, options: Iterable[str], *, sloppy: bool = False) -> list[str]:
    """Return the arguments for `datastore mount`. Errors: ValueError naming an unknown option, unless sloppy."""
    name: list[str] = []
    given: list[str] = []
    for option in options:
        key, _, value = option.partition("=")
        if option in _FLAGS:
            given.append(_FLAGS[option])
        elif key in _VALUES and value:
            given += [_VALUES[key], value]
        elif key == "name" and value:
            name = [value]
        elif not (sloppy or option in _NOT_OURS or option.startswith(_NOT_OURS_BEGIN)):
            known = ", ".join([*_FLAGS, "name=", *(f"{each}=" for each in _VALUES)])
            raise ValueError(f"mount option {option!r} is unknown; there are {known}")
    return ["mount", *given, "--", file, *name, directory]


def mount() -> NoReturn:
    """Run `mount.datastore FILE DIR [-sfnv] [-o OPTIONS]`."""
    parser = _Parser(prog="mount.datastore", description="Mount a Datastore; called by mount -t datastore.")
    parser.add_argument("file", help="YAML file with the Datastore")
    parser.add_argument("directory")
    parser.add_argument("-s", dest="sloppy", action="store_true", help="ignore unknown options")
    parser.add_argument("-f", dest="fake", action="store_true", help="do everything but mount")
    parser.add_argument("-n", action="store_true", help="accepted and ignored")
    parser.add_argument("-v", action="store_true", help="accepted and ignored")
    parser.add_argument("-t", metavar="TYPE", help="accepted and ignored")
    parser.add_argument(
        "-o", dest="options", action="append", default=[], help="name=NAME, ro, uid=, gid=, umask=, ..."
    )
    asked = parser.parse_intermixed_args()
    options = [option for listed in asked.options for option in listed.split(",") if option]
    try:
        arguments = mount_arguments(asked.file, asked.directory, options, sloppy=asked.sloppy)
    except ValueError as error:
        parser.error(str(error))
    if asked.fake or _is_there(arguments, asked.directory):
        leave(0)
    leave(_exit_status(run(arguments)))


def _is_there(arguments: list[str], directory: str) -> bool:
    """Return whether this Datastore is mounted there already, so that `mount --all` can be repeated."""
    there = record_at(real_path(directory))
    if there is None or not (there.pids or (there.in_kernel and mounttable.mounted_at(there.mountpoint))):
        return False
    _, file, *name, _ = arguments[arguments.index("--") :]
    try:
        return load(file).pick(*name).name == there.name
    except DatastoreError:
        return False  # `datastore mount` reports this error next


def umount() -> NoReturn:
    """Run `umount.fuse.datastore DIR [-flnrv]`. Without -l it uploads what is left, as `datastore umount` does."""
    parser = _Parser(prog="umount.fuse.datastore", description="Unmount a Datastore; called by umount.")
    parser.add_argument("directory")
    parser.add_argument("-f", dest="force", action="store_true", help="as datastore umount --force")
    parser.add_argument("-l", dest="lazy", action="store_true", help="detach the mount from the directory tree at once")
    for flag in "nrv":
        parser.add_argument(f"-{flag}", action="store_true", help="accepted and ignored")
    parser.add_argument("-t", metavar="TYPE", help="accepted and ignored")
    asked = parser.parse_intermixed_args()
    if asked.lazy or record_at(real_path(asked.directory)) is None:
        # Without --internal-only, umount(8) would call this helper again.
        leave(subprocess.call(["umount", "--internal-only", *["--lazy"] * asked.lazy, "--", asked.directory]))
    leave(_exit_status(run(["umount", *["--force"] * asked.force, "--", asked.directory])))


def _exit_status(code: int) -> int:
    return 0 if code == 0 else USAGE if code == _USAGE_OF_OURS else FAILED
