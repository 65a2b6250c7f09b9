"""Mounts a Datastore, for `mount` and `run`; unmounting.py unmounts.

A mount that fails or is interrupted removes what it made. After a crash nothing is unmounted by itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from datastore import mountinfo, ourprocess
from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest
from datastore.api.resolve import Directories, MountOptions, mount_spec, state_name
from datastore.controlclient import MOUNT_FILE, PROGRAM_END_S, PROGRAM_FILE
from datastore.errors import DatastoreError, InvalidManifest, MountFailed, error_named
from datastore.mounting import directory, kernelnfs, mounttable, unsent
from datastore.mounting.mountserver import start
from datastore.mounting.places import cache_root, make_cache, make_private, state_root
from datastore.mounting.records import COMMAND_FILE, MountRecord, read_record, remove_made
from datastore.mounting.signals import SignalWatch
from datastore.privatefile import write_json

ENDING_TIMEOUT_S = 10.0
"""How long the processes of a mount that was just unmounted by hand may take to end."""
ENDED_MAX = 100
"""How many mounts that ended keep their state directory: a later mount at the same place then asks the store less."""
_POLL_S = 0.02
_DETACH = f"""
read -r _
tries={PROGRAM_END_S * 10:.0f}
while [ -e "/proc/$(cat "$1")/exe" ] && [ $tries -gt 0 ]; do sleep 0.1; tries=$((tries - 1)); done
umount -c -i -l -- "$0" && rm -f -- "$@"
"""


def mount(
    manifest: Manifest,
    datastore: Datastore,
    mountpoint: str,
    options: MountOptions,
    watch: SignalWatch,
    *,
    ends_with_us: bool = False,
) -> MountRecord:
    """Mount a Datastore at an absolute path. ends_with_us: the mount ends when this process dies, also by kill -9.
    Errors: any DatastoreError, Interrupted; then nothing stays mounted."""
    if not datastore.spec.s3 and (options.uid, options.gid, options.umask) != (None, None, None):
        raise InvalidManifest(
            f"Datastore {datastore.name}: --uid, --gid and --umask are for s3; {datastore.spec.backend} knows owners"
        )
    if datastore.spec.local:
        record = _mount_local(datastore, mountpoint, options, watch)
        return _ending_with_us(record) if ends_with_us else record
    _forget_oldest()
    directories = Directories(state_root=str(state_root()), cache_dir=str(cache_root()))
    spec = mount_spec(manifest, datastore, mountpoint, directories, options)
    state_dir = Path(spec.state_dir)
    seen = {"name": spec.name, "mountpoint": mountpoint, "location": datastore.location, "read_only": spec.read_only}
    if kernelnfs.mounts(spec):
        with _named(datastore):
            record = _mount_in_kernel(state_dir, {**seen, "kind": "nfs"}, lambda: kernelnfs.mount(spec, watch), watch)
        return _ending_with_us(record) if ends_with_us else record
    make_cache(Path(spec.cache_dir))
    with _locked(state_dir), _prepared(mountpoint) as made:
        _refuse_serving(state_dir, mountpoint)
        _keep(mountpoint, state_dir / COMMAND_FILE, {**seen, "made": made})
        with _named(datastore):
            ready = start(spec, watch, ends_with_us=ends_with_us)
    return MountRecord(
        state_dir=state_dir,
        name=spec.name,
        mountpoint=mountpoint,
        location=datastore.location,
        read_only=spec.read_only,
        supervisor_pid=ready.supervisor_pid,
        server_pid=ready.server_pid,
        made=made,
    )


@contextmanager
def _named(datastore: Datastore) -> Iterator[None]:
    """Begin what the storage, or the search for credentials, reports with the name of the Datastore."""
    try:
        yield
    except DatastoreError as error:
        raise error_named(type(error).__name__, f"Datastore {datastore.name}: {error}") from error


def _refuse_serving(state_dir: Path, mountpoint: str) -> None:
    """Wait until no process serves from the state directory, unseen at the mount point. Errors: MountFailed."""
    deadline = time.monotonic() + ENDING_TIMEOUT_S
    while (record := read_record(state_dir)) and record.pids:
        if time.monotonic() > deadline:
            raise MountFailed(
                f"{mountpoint}: pid {record.pids[-1]} still serves Datastore {record.name} there, for programs that "
                "have files open since it was unmounted by hand, or in another mount namespace; "
                f"`datastore umount --force {mountpoint}` ends it"
            )
        time.sleep(_POLL_S)


def _mount_local(datastore: Datastore, mountpoint: str, options: MountOptions, watch: SignalWatch) -> MountRecord:
    source = datastore.spec.local.path if datastore.spec.local else ""
    read_only = datastore.spec.read_only or options.read_only
    if os.geteuid() != 0:
        raise MountFailed(
            f"Datastore {datastore.name} is the directory {source}; only root can mount it, so use it directly"
        )
    if not os.path.isdir(source):
        raise MountFailed(f"Datastore {datastore.name}: spec.local.path {source} is not a directory")
    state_dir = state_root() / state_name(datastore.name, mountpoint, datastore.location)
    seen = {"name": datastore.name, "mountpoint": mountpoint, "location": datastore.location}
    in_kernel = {**seen, "kind": "bind", "read_only": read_only}
    bind = partial(mounttable.bind, source, mountpoint, read_only=read_only)
    return _mount_in_kernel(state_dir, in_kernel, bind, watch)


def _mount_in_kernel(
    state_dir: Path, seen: Mapping[str, object], mount: Callable[[], None], watch: SignalWatch
) -> MountRecord:
    """Make a mount that needs no process of ours. Errors: those of `mount`, MountFailed, Interrupted, with nothing left
    mounted: the record of the mount is kept before there is one."""
    mountpoint = str(seen["mountpoint"])
    with _locked(state_dir), _prepared(mountpoint) as made:
        _refuse_serving(state_dir, mountpoint)
        _keep(mountpoint, state_dir / COMMAND_FILE, {"made": made})
        _keep(mountpoint, state_dir / MOUNT_FILE, {"spec": seen})
        try:
            record = read_record(state_dir)
            if record is None:
                raise MountFailed(f"{mountpoint}: is not mounted, as its record in {state_dir} can't be read")
            watch.check()
            mount()
        except BaseException:
            (state_dir / MOUNT_FILE).unlink(missing_ok=True)
            raise
    return record


def _ending_with_us(record: MountRecord) -> MountRecord:
    """Have a shell detach a mount of the kernel when this process dies: then the pipe on which the shell waits ends. It
    first waits for our command."""
    reading, _writing = os.pipe()  # nothing closes its other end before we die
    files = [str(record.state_dir / name) for name in (PROGRAM_FILE, MOUNT_FILE, COMMAND_FILE)]
    shell = subprocess.Popen(
        ["sh", "-c", _DETACH, record.mountpoint, *files],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reading)
    ourprocess.let_go(shell)
    return record


def _keep(mountpoint: str, path: Path, record: Mapping[str, object]) -> None:
    """Write a record of a mount that is about to be made. Errors: MountFailed."""
    try:
        write_json(path, record)
    except OSError as error:
        raise MountFailed(
            f"{mountpoint}: is not mounted, as its record {path} can't be written: {error.strerror}; correct that and "
            "mount it again"
        ) from error


@contextmanager
def _prepared(mountpoint: str) -> Iterator[tuple[str, ...]]:
    made = directory.prepare(mountpoint)
    try:
        yield made
    except BaseException:
        remove_made(made)
        raise


def _forget_oldest() -> None:
    """Remove the state directories of mounts that ended cleanly, but for the last ENDED_MAX. What is mounted below one,
    or can't be removed, stays."""
    mounts = mountinfo.read().mounts
    with suppress(OSError):
        ended = [each for each in state_root().iterdir() if not _is_recorded(each)]
        for state_dir in sorted(ended, key=lambda each: each.stat().st_mtime)[:-ENDED_MAX]:
            if not any(mount.mountpoint.startswith(f"{state_dir}/") for mount in mounts):
                with suppress(MountFailed), _locked(state_dir):
                    if not _is_recorded(state_dir) and not unsent.remaining(state_dir):
                        shutil.rmtree(state_dir)


def _is_recorded(state_dir: Path) -> bool:
    return any((state_dir / name).exists() for name in (MOUNT_FILE, COMMAND_FILE))


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold a lock, so that one command at a time mounts from a state directory. Errors: MountFailed."""
    make_private(state_root())
    make_private(state_dir)
    fd = os.open(state_dir / "cli.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise MountFailed("another datastore command is mounting the same Datastore there") from None
    try:
        yield
    finally:
        os.close(fd)
