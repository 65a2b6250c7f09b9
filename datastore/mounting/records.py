"""The records of this user's mounts, crashed ones included, in the mounts' state directories (`<state root>/<mount>/`).

mount.json is written by the mount's supervisor, or by the command if the mount has none. cli.json is the command's own:
what was mounted, and the directories made for it. It outlives mount.json if changes could not be uploaded, so that they
stay listed. Both files are validated when they are read: a broken file never breaks `list`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datastore.controlclient import MOUNT_FILE, MOUNT_FILE_BYTES, SOCKET
from datastore.mounting.places import state_root
from datastore.mounting.unsent import remaining
from datastore.privatefile import write_json

COMMAND_FILE = "cli.json"
SERVER_MODULE = b"datastore.fuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRecord:
    """A mount that was made and has not ended cleanly. ended: it was unmounted, but changes are not uploaded. made: the
    directories that are removed with it, deepest first."""

    state_dir: Path
    name: str
    mountpoint: str
    location: str
    read_only: bool = False
    in_kernel: Literal["", "bind", "nfs"] = ""
    """How the kernel serves the mount without a process of ours: by a bind mount or by NFS; '' when it does not."""
    ended: bool = False
    supervisor_pid: int = 0
    server_pid: int = 0
    made: tuple[str, ...] = ()
    transport: str = "kernel"
    trouble: str = ""
    """Why no server serves the mount now, or ''."""
    refused: str = ""
    """Why the last restart was not done, or ''."""
    noted_at: float = 0.0
    """When the supervisor last wrote mount.json (seconds since the epoch)."""

    @property
    def pids(self) -> list[int]:
        """The mount's processes that are alive and still are ours (the system may have reused a pid)."""
        # The supervisor comes first: ended after the server, it would start another one.
        return [pid for pid in (self.supervisor_pid, self.server_pid) if is_server(pid)]


def all_records() -> list[MountRecord]:
    """Return all records, sorted by mount point."""
    try:
        found = [read_record(each) for each in state_root().iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return sorted((each for each in found if each), key=lambda each: (each.mountpoint, each.name))


def read_record(state_dir: Path) -> MountRecord | None:
    """Return the record in a state directory; None when there is no mount, or the file is broken."""
    own = _read(state_dir / COMMAND_FILE)
    raw = _read(state_dir / MOUNT_FILE)
    ended = not raw and remaining(state_dir) > 0
    spec = own if ended else _mapping(raw.get("spec"), raw)
    if not isinstance(spec.get("name"), str) or not isinstance(spec.get("mountpoint"), str):
        return None
    made = own.get("made", [])
    return MountRecord(
        state_dir=state_dir,
        name=spec["name"],
        mountpoint=spec["mountpoint"],
        location=str(spec.get("location", "")),
        read_only=spec.get("read_only") is True,
        in_kernel=spec["kind"] if spec.get("kind") in ("bind", "nfs") else "",
        ended=ended,
        supervisor_pid=_pid(raw.get("supervisorPid")),
        server_pid=_pid(raw.get("serverPid")),
        made=tuple(each for each in made if isinstance(each, str)) if isinstance(made, list) else (),
        transport=str(spec.get("transport", "kernel")),
        trouble=str(raw.get("trouble", "")),
        refused=str(raw.get("refused", "")),
        noted_at=float(raw["started"]) if isinstance(raw.get("started"), int | float) else 0.0,
    )


def forget(record: MountRecord) -> None:
    """After a clean unmount, remove the record and the directories made for the mount. Idempotent. The rest of the
    state directory stays: inode numbers must be the same at the next mount."""
    for name in (MOUNT_FILE, COMMAND_FILE, SOCKET):
        (record.state_dir / name).unlink(missing_ok=True)
    remove_made(record.made)


def keep_unsent(record: MountRecord) -> None:
    """After an unmount that left changes, keep a record in cli.json, so that the changes stay listed. Idempotent."""
    seen = {"name": record.name, "mountpoint": record.mountpoint, "location": record.location}
    write_json(record.state_dir / COMMAND_FILE, {**seen, "read_only": record.read_only})
    for name in (MOUNT_FILE, SOCKET):
        (record.state_dir / name).unlink(missing_ok=True)
    remove_made(record.made)


def remove_made(made: tuple[str, ...]) -> None:
    """Remove directories that were made for a mount; stop at the first that can't be removed, as it is in use."""
    for directory in made:
        try:
            os.rmdir(directory)
        except OSError:
            return


def is_server(pid: int) -> bool:
    """Return whether a live process is a mount server or supervisor; without /proc, only whether it lives."""
    if pid <= 1:
        return False
    try:
        return SERVER_MODULE in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return not Path("/proc/self").exists() and _is_alive(pid)
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _mapping(value: object, fallback: Mapping[str, Any]) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else fallback


def _pid(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return _mapping(json.loads(file.read(MOUNT_FILE_BYTES)), {})
    except (OSError, ValueError, RecursionError):
        return {}
