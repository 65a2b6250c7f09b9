"""Unmounts, for `umount`, `run` and other callers that mount for a while.

An unmount that can't upload everything raises an error, and the data is kept on disk. A mount of NFS keeps nothing on
disk: what its server process has in memory is lost by a forced unmount, and the error says so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from datastore import beneath, controlclient
from datastore.errors import DatastoreError, MountFailed
from datastore.mounting import directory, kernelnfs, mounttable, unsent, waiting
from datastore.mounting.errors import Unsynced
from datastore.mounting.mountserver import end_server
from datastore.mounting.records import MountRecord, forget, is_server, keep_unsent, remove_made
from datastore.mounting.signals import SignalWatch
from datastore.mounting.silence import storage_words
from datastore.units import format_count, format_size

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 600.0
"""The longest wait for the upload of what is left; in 600 s, 7 GiB are sent at 100 Mbit/s."""
FORCE_TIMEOUT_S = 10.0
"""How long a forced unmount waits for the upload; a server that has not answered by then is killed."""
GIVEN_UP_TIMEOUT_S = 2.0
"""The same after a signal, with which the user asked not to wait any longer."""
GONE_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 1.0
"""How long a forced unmount waits to learn what the server has only in memory."""
_FILES_NAMED = 3
_POLL_S = 0.02


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
    detach: if programs use the directory, detach it as umount -l does. The programs continue, what they still write is
    uploaded, and the mount ends with the last of them. Return a text that names them, or '' when there are none.
    timeout_s: FORCE_TIMEOUT_S or STOP_TIMEOUT_S by default. say: called with a line when a signal forces the unmount,
    when the server runs on for a process that still has the mount in another mount namespace, as a local job may, and,
    if there is a watch for the signals of a person who waits, when the uploads take long.
    Errors: Unsynced when changes remain (kept on disk, or lost by force); controlclient.NotAnswering when the server
    hangs and force is not given; MountFailed when the directory is in use, and is a bind mount or neither force nor
    detach is given."""
    patience_s = timeout_s if timeout_s is not None else FORCE_TIMEOUT_S if force else STOP_TIMEOUT_S
    if record.in_kernel:
        if record.in_kernel == "nfs":
            kernelnfs.unmount(record.mountpoint, force=force or detach, timeout_s=patience_s, watch=watch)
        elif mounttable.mounted_at(record.mountpoint):
            mounttable.unmount_bind(record.mountpoint)
        forget(record)
        return ""
    unstored = in_memory(record) if force else ""
    try:
        with _told(record, time.monotonic() + patience_s, say) if watch else nullcontext():
            answer = _stop(record, watch, force=force, detach=detach, timeout_s=patience_s)
        if answer is None:
            unstored = in_memory(record)
            fate = "what the server has not stored is lost" if unstored else "what is not uploaded is kept on disk"
            say(f"interrupted: unmounting {record.mountpoint} now; {fate}")
            force = True
            answer = _stop(record, None, force=True, detach=detach, timeout_s=GIVEN_UP_TIMEOUT_S) or {}
    except controlclient.NotAnswering as error:
        _end_silent(record, error, unstored, force=force)
        return ""
    return _finish(record, answer, say)


def _told(record: MountRecord, deadline: float, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """A context that says what the unmount waits for, and until when."""

    def why() -> str:
        return waiting.left_of([record]) or "its server is ending"

    return waiting.told(f"the mount at {record.mountpoint}", deadline, why, say)


def _stop(
    record: MountRecord, watch: SignalWatch | None, *, force: bool, detach: bool, timeout_s: float
) -> dict[str, Any] | None:
    """Ask the server to stop; return its answer; None when a signal came first. Errors: controlclient.NotAnswering."""
    with controlclient.connected(record.state_dir) as connection:
        asked = time.monotonic()
        connection.send({"op": "stop", "force": force, "detach": detach, "withinSeconds": timeout_s, "asked": asked})
        answer = connection.receive(timeout_s, watch)
    if answer is None and watch:
        watch.take()
    return answer


def _finish(record: MountRecord, answer: dict[str, Any], say: Callable[[str], None]) -> str:
    """Act on the server's answer to a stop. A forced stop is ok even if changes remain; its errors name them."""
    told = answer.get("errors")
    errors = [str(each) for each in told] if isinstance(told, list) else []
    text = "; ".join(errors) or "no reason given"
    users, elsewhere = answer.get("detached"), answer.get("elsewhere")
    if users or elsewhere:
        _restore_beneath(record)
        remove_made(record.made)
    # Without its directory a mount ends in other mount namespaces, too (rmdir(2), since Linux 3.18).
    if users or (elsewhere and os.path.lexists(record.mountpoint)):
        goes_on = users or f"{record.mountpoint} is still mounted in the mount namespace of {elsewhere}"
        if errors:
            raise Unsynced(
                f"{goes_on}; it was detached, but not everything is uploaded: {text}; it is tried until they end"
            )
        if not users:
            say(f"{goes_on}; it is served until they end")
        return str(users or "")
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
        if lost := answer.get("inMemory"):
            raise _lost(record, f"{format_size(lost)}: {text}")
    elif dirty := dirty_of(record):
        raise _still_mounted(record, text, dirty)
    else:
        raise MountFailed(text if text.startswith(record.mountpoint) else f"{record.mountpoint}: {text}")
    return ""


def _restore_beneath(record: MountRecord) -> None:
    """Restore the directory beneath the mount, in case the supervisor died before it did so."""
    if not mounttable.mounted_at(record.mountpoint) and not directory.is_of_another(record):
        beneath.restore(record.mountpoint, record.state_dir / beneath.NOTE_FILE)


def dirty_of(record: MountRecord) -> list[Any]:
    """Return a mount's changes that are not uploaded, from its server or, if that is gone, its state directory."""
    try:
        dirty = controlclient.status(record.state_dir).get("dirty")
    except controlclient.NotAnswering:
        return unsent.unsent_files(record.state_dir)
    return dirty if isinstance(dirty, list) else []


def _end_silent(record: MountRecord, error: DatastoreError, unstored: str, *, force: bool) -> None:
    """End a mount whose server does not answer, because it crashed, hangs or was ended. unstored: what in_memory() said
    before it was asked to end, since it may have ended by now. Errors: as unmount()."""
    if record.pids and not force:
        raise _not_ended(record, error)
    lost = in_memory(record) or unstored
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
            f"{record.mountpoint}: not mounted any more, but not uploaded: {format_count(remaining, 'changed file')};"
            f" kept on disk; {_later(record)}"
        )
    forget(record)
    if lost:
        raise _lost(record, lost)


def _lost(record: MountRecord, what: str) -> Unsynced:
    return Unsynced(
        f"{record.mountpoint}: unmounted, but the server had not stored all that programs had written to files that"
        f" they have open; that is lost: {what}"
    )


def _not_ended(record: MountRecord, error: DatastoreError) -> DatastoreError:
    """Return the error of an unmount to which the server gave no answer in time. Where the server answers other
    requests, it is not at fault: its storage is, or what is to be uploaded takes longer."""
    why = str(error)
    try:
        told = controlclient.status(record.state_dir)
        dirty = told.get("dirty")
        if told.get("detached") and not dirty:
            return controlclient.NotAnswering(
                f"{record.mountpoint}: unmounted, but requests still run: {storage_words(told) or why}; the mount's"
                " processes end with them, or at once by `datastore umount --force`"
            )
        why = storage_words(told) or ("the uploads have not ended in time" if dirty else why)
    except controlclient.NotAnswering:
        dirty = unsent.unsent_files(record.state_dir)
    if dirty:
        return _still_mounted(record, why, dirty)
    return controlclient.NotAnswering(f"{record.mountpoint}: {why}; `datastore umount --force` ends it anyway")


def in_memory(record: MountRecord) -> str:
    """Return how many bytes are only in the memory of the mount's server, of which files, and why; '' if there are
    none. The reason is that the storage does not answer, or that it refuses to store them."""
    try:
        told = controlclient.status(record.state_dir, LOOK_TIMEOUT_S)
    except controlclient.NotAnswering:
        return ""
    size, dirty = told.get("inMemory"), told.get("dirty")
    if not isinstance(size, int) or not size or not isinstance(dirty, list):
        return ""
    files = ", ".join(str(each.get("path")) for each in dirty[:_FILES_NAMED])
    more = f" and {len(dirty) - _FILES_NAMED:,} more" if len(dirty) > _FILES_NAMED else ""
    return f"{format_size(size)} of {files}{more}: {storage_words(told) or told['unsent']['error']}"


def _still_mounted(record: MountRecord, why: str, dirty: list[Any]) -> Unsynced:
    if in_memory(record):
        return Unsynced(
            f"{record.mountpoint}: still mounted, because the server has not stored all that programs wrote: {why}; "
            "repeat it when the server can store it; "
            f"`datastore umount --force {record.mountpoint}` unmounts, and loses it"
        )
    ways = _ways_out(record, dirty, f"`datastore unsent --retry {record.mountpoint}` tries again")
    return Unsynced(
        f"{record.mountpoint}: still mounted, because not everything is uploaded: {why}; {ways}, "
        f"`datastore umount --force {record.mountpoint}` unmounts and keeps it on disk"
    )


def _later(record: MountRecord) -> str:
    return _ways_out(record, unsent.unsent_files(record.state_dir), "mount it there again to upload it")


def _ways_out(record: MountRecord, files: list[Any], again: str) -> str:
    """Return what can be done about files that are not uploaded. again: how to retry them, which is useless if each of
    them is stuck."""
    stuck = [bool(each.get("stuck")) for each in files]
    ways = [] if stuck and all(stuck) else [again]
    ways.append(f"`datastore unsent --save DIR {record.mountpoint}` copies it elsewhere")
    if any(stuck):
        ways.append("`--discard FILE` in place of `--save DIR` drops a file that no retry can upload")
    return ", ".join(ways)


def _wait_until_gone(record: MountRecord) -> None:
    deadline = time.monotonic() + GONE_TIMEOUT_S
    # The supervisor restores the mode of the directory beneath before it ends.
    while mounttable.mounted_at(record.mountpoint) or is_server(record.supervisor_pid):
        if time.monotonic() > deadline:
            if not mounttable.mounted_at(record.mountpoint):
                return
            raise MountFailed(f"{record.mountpoint}: is still mounted; close what uses it and try again")
        time.sleep(_POLL_S)
