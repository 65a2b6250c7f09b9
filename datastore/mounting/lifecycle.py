"""From a Datastore to a mounted directory and back, for `mount`, `umount` and `run`.

Both ways leave nothing half done: a failed or interrupted mount removes what it made, and an unmount that can't upload
everything says so and keeps the data. A crash never unmounts by itself; only these functions do.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from datastore import beneath, controlclient
from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest
from datastore.api.resolve import MountOptions, mount_spec, state_name
from datastore.controlclient import MOUNT_FILE
from datastore.errors import DatastoreError, InvalidManifest, MountFailed
from datastore.mounting import directory, kernelnfs, mounttable, unsent
from datastore.mounting.errors import Unsynced
from datastore.mounting.mountserver import end_server, start
from datastore.mounting.places import directories, make_cache, make_private, state_root
from datastore.mounting.records import (
    COMMAND_FILE,
    MountRecord,
    forget,
    is_server,
    keep_unsent,
    read_record,
    remove_made,
    write_json,
)
from datastore.mounting.signals import SignalWatch

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 600.0
"""Longest wait for the upload of what is left. 600 s: 7 GiB at 100 Mbit/s."""
FORCE_TIMEOUT_S = 10.0
"""A forced stop still tries to upload; after this it is ended the hard way."""
GIVEN_UP_TIMEOUT_S = 2.0
"""The same for somebody who did not want to wait any more."""
GONE_TIMEOUT_S = 10.0
ENDING_TIMEOUT_S = 10.0
"""For a mount that was just unmounted by hand: its processes need a moment to end."""
_POLL_S = 0.02


def mount(
    manifest: Manifest, datastore: Datastore, mountpoint: str, options: MountOptions, watch: SignalWatch
) -> MountRecord:
    """Mount a Datastore at an absolute path. Errors: any DatastoreError; Interrupted. Then nothing is left."""
    if not datastore.spec.s3 and (options.uid, options.gid, options.umask) != (None, None, None):
        raise InvalidManifest(
            f"Datastore {datastore.name}: --uid, --gid and --umask are for s3; {datastore.spec.backend} knows owners"
        )
    if datastore.spec.local:
        return _mount_local(datastore, mountpoint, options, watch)
    spec = mount_spec(manifest, datastore, mountpoint, directories(), options)
    state_dir = Path(spec.state_dir)
    if kernelnfs.mounts(spec):
        seen = {"name": spec.name, "mountpoint": mountpoint, "location": datastore.location}
        in_kernel = {**seen, "kind": "nfs", "read_only": spec.read_only}
        return _mount_in_kernel(state_dir, in_kernel, lambda: kernelnfs.mount(spec, watch), watch)
    make_cache(Path(spec.cache_dir))
    with _locked(state_dir), _prepared(mountpoint) as made:
        _refuse_serving(state_dir, mountpoint)
        seen = {"name": spec.name, "mountpoint": mountpoint, "location": datastore.location}
        write_json(state_dir / COMMAND_FILE, {**seen, "read_only": spec.read_only, "made": made})
        ready = start(spec, watch)
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


def unmount(
    record: MountRecord,
    watch: SignalWatch | None = None,
    *,
    force: bool = False,
    detach: bool = False,
    timeout_s: float | None = None,
    say: Callable[[str], None] = log.warning,
) -> str:
    """Upload what is left and unmount; with force, unmount also when that fails or takes longer than timeout_s.

    detach: where programs use the directory, take it out of the tree all the same, as umount -l does. They go on; what
    they still write is uploaded, and the mount ends when they do. Who they are is returned, '' when nobody is.
    timeout_s: FORCE_TIMEOUT_S or STOP_TIMEOUT_S unless given. say: told what a signal changed.
    Errors: Unsynced when changes remain (they are kept on disk); controlclient.NotAnswering when the server hangs and
    force is not given; MountFailed when the directory is in use and neither force nor detach is given.
    """
    if record.in_kernel:
        if record.in_kernel == "nfs":
            patience_s = timeout_s if timeout_s is not None else FORCE_TIMEOUT_S if force else STOP_TIMEOUT_S
            kernelnfs.unmount(record.mountpoint, force=force or detach, timeout_s=patience_s, watch=watch)
        elif mounttable.mounted_at(record.mountpoint):
            mounttable.unmount_bind(record.mountpoint)
        forget(record)
        return ""
    try:
        patience_s = timeout_s if timeout_s is not None else FORCE_TIMEOUT_S if force else STOP_TIMEOUT_S
        answer = _stop(record, watch, force=force, detach=detach, timeout_s=patience_s)
        if answer is None:
            say(f"interrupted: unmounting {record.mountpoint} now; what is not uploaded is kept on disk")
            force = True
            answer = _stop(record, None, force=True, detach=detach, timeout_s=GIVEN_UP_TIMEOUT_S) or {}
    except controlclient.NotAnswering as error:
        _end_silent(record, error, force=force)
        return ""
    return _finish(record, answer)


def _stop(
    record: MountRecord, watch: SignalWatch | None, *, force: bool, detach: bool, timeout_s: float
) -> dict[str, Any] | None:
    """Ask the server to stop; None when a signal came before its answer."""
    with controlclient.connected(record.state_dir) as connection:
        asked = time.monotonic()
        connection.send({"op": "stop", "force": force, "detach": detach, "withinSeconds": timeout_s, "asked": asked})
        answer = connection.receive(timeout_s, watch)
    if answer is None and watch:
        watch.take()
    return answer


def _finish(record: MountRecord, answer: dict[str, Any]) -> str:
    """Act on the answer to a stop. A forced one is ok even when changes remain; its errors name them."""
    told = answer.get("errors")
    errors = [str(each) for each in told] if isinstance(told, list) else []
    text = "; ".join(errors) or "no reason given"
    if users := answer.get("detached"):
        _restore_beneath(record)
        remove_made(record.made)
        if errors:
            raise Unsynced(
                f"{users}; it was detached, but not everything is uploaded: {text}; it is tried until they end"
            )
        return str(users)
    if answer.get("ok") is True:
        _wait_until_gone(record)
        _restore_beneath(record)
        if errors and unsent.remaining(record.state_dir):
            keep_unsent(record)
            raise Unsynced(
                f"{record.mountpoint}: unmounted, but not everything is uploaded; it is kept on disk: {text}; "
                f"{_later(record)}"
            )
        forget(record)
    elif dirty_of(record):
        raise _still_mounted(record, text)
    else:
        raise MountFailed(text if text.startswith(record.mountpoint) else f"{record.mountpoint}: {text}")
    return ""


def _restore_beneath(record: MountRecord) -> None:
    """The supervisor did it, unless it died before."""
    if not mounttable.mounted_at(record.mountpoint) and not directory.is_of_another(record):
        beneath.restore(record.mountpoint, record.state_dir / beneath.NOTE_FILE)


def _refuse_serving(state_dir: Path, mountpoint: str) -> None:
    """Whoever serves from this directory is not to be seen at `mountpoint`, but lives, and must not be disturbed."""
    deadline = time.monotonic() + ENDING_TIMEOUT_S
    while (record := read_record(state_dir)) and record.pids:
        if time.monotonic() > deadline:
            raise MountFailed(
                f"{mountpoint}: pid {record.pids[-1]} still serves Datastore {record.name} there, for programs that "
                "have files open since it was unmounted by hand, or in another mount namespace; "
                f"`datastore umount --force {mountpoint}` ends it"
            )
        time.sleep(_POLL_S)


def dirty_of(record: MountRecord) -> list[Any]:
    """The changes of a mount that are not uploaded, from its server or, when that is gone, from its state directory."""
    try:
        dirty = controlclient.status(record.state_dir).get("dirty")
    except controlclient.NotAnswering:
        return unsent.unsent_files(record.state_dir)
    return dirty if isinstance(dirty, list) else []


def _end_silent(record: MountRecord, error: DatastoreError, *, force: bool) -> None:
    """End a mount whose server does not answer: it crashed, it hangs, or it was ended already."""
    if record.pids and not force and dirty_of(record):
        raise _still_mounted(record, str(error))
    if record.pids and not force:
        raise controlclient.NotAnswering(f"{record.mountpoint}: {error}; `datastore umount --force` ends it anyway")
    for pid in record.pids:
        end_server(pid)
    if not directory.is_of_another(record):
        at = mounttable.mounted_at(record.mountpoint)
        if at and at.fstype.startswith("fuse"):
            mounttable.end_dead(record.mountpoint)
        beneath.restore(record.mountpoint, record.state_dir / beneath.NOTE_FILE)
    remaining = unsent.remaining(record.state_dir)
    if remaining:
        keep_unsent(record)
        raise Unsynced(
            f"{record.mountpoint}: not mounted any more, and {remaining} changed files are not uploaded; they are kept "
            f"on disk; {_later(record)}"
        )
    forget(record)


def _still_mounted(record: MountRecord, why: str) -> Unsynced:
    return Unsynced(
        f"{record.mountpoint}: still mounted, because not everything is uploaded: {why}; "
        f"`datastore unsent --retry {record.mountpoint}` tries again, `--save DIR` copies it elsewhere, "
        f"`datastore umount --force {record.mountpoint}` unmounts and keeps it on disk"
    )


def _later(record: MountRecord) -> str:
    return (
        f"mount it there again to upload it, or `datastore unsent --save DIR {record.mountpoint}` copies it elsewhere"
    )


def _wait_until_gone(record: MountRecord) -> None:
    deadline = time.monotonic() + GONE_TIMEOUT_S
    # Its supervisor gives the directory beneath its mode back.
    while mounttable.mounted_at(record.mountpoint) or is_server(record.supervisor_pid):
        if time.monotonic() > deadline:
            if not mounttable.mounted_at(record.mountpoint):
                return
            raise MountFailed(f"{record.mountpoint}: is still mounted; close what uses it and try again")
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
    """What needs no process of ours. Errors: of `mount`; MountFailed; Interrupted. Then nothing is left."""
    with _locked(state_dir), _prepared(str(seen["mountpoint"])) as made:
        _refuse_serving(state_dir, str(seen["mountpoint"]))
        write_json(state_dir / COMMAND_FILE, {"made": made})
        watch.check()
        mount()
        write_json(state_dir / MOUNT_FILE, {"spec": seen})
    record = read_record(state_dir)
    if record is None:
        raise MountFailed(f"{state_dir}: can't keep the record of this mount")
    return record


@contextmanager
def _prepared(mountpoint: str) -> Iterator[tuple[str, ...]]:
    made = directory.prepare(mountpoint)
    try:
        yield made
    except BaseException:
        remove_made(made)
        raise


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """One command at a time mounts from a state directory."""
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
