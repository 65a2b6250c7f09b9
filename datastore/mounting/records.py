"""What is known of each mount of this user: `<state root>/<mount>/mount.json`, whether its processes live or not.

The mount server writes mount.json for its mounts, this command for mounts without one. cli.json is the command's own:
what was mounted, and the directories made for it. It outlives mount.json where changes could not be uploaded, so that
they stay listed. Both are read with suspicion; a broken file never breaks `list`.
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

COMMAND_FILE = "cli.json"
SERVER_MODULE = b"datastore.fuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRecord:
    """One mount that was made and not cleanly ended.

    ended: it was unmounted, but changes are not uploaded. made: directories to remove with it, deepest first.
    """

    state_dir: Path
    name: str
    mountpoint: str
    location: str
    read_only: bool = False
    in_kernel: Literal["", "bind", "nfs"] = ""
    """How the kernel serves it without a process of ours: as a bind mount, by its NFS client; '' where it does not."""
    ended: bool = False
    supervisor_pid: int = 0
    server_pid: int = 0
    made: tuple[str, ...] = ()
    transport: str = "kernel"
    upgradable: bool = False
    """The kernel can hand requests to another server, so `restart` works."""
    trouble: str = ""
    """Why no server serves it now."""
    refused: str = ""
    """Why the last restart was not done."""
    noted_at: float = 0.0
    """When its supervisor wrote this (seconds since the epoch)."""

    @property
    def pids(self) -> list[int]:
        """Its processes that are alive and really are mount servers (a pid may be someone else's by now)."""
        # The supervisor first: who ends them must not have it start another server.
        return [pid for pid in (self.supervisor_pid, self.server_pid) if is_server(pid)]


def all_records() -> list[MountRecord]:
    """Every record, by mount point."""
    try:
        found = [read_record(each) for each in state_root().iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return sorted((each for each in found if each), key=lambda each: (each.mountpoint, each.name))


def read_record(state_dir: Path) -> MountRecord | None:
    """The record of one state directory; None when nothing is mounted from it, or the file is broken."""
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
        upgradable=raw.get("upgradable") is True,
        trouble=str(raw.get("trouble", "")),
        refused=str(raw.get("refused", "")),
        noted_at=float(raw["started"]) if isinstance(raw.get("started"), int | float) else 0.0,
    )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a small file as one step; only the owner can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def forget(record: MountRecord) -> None:
    """After a clean unmount: the mount is gone from `list`, and so are the directories made for it.

    The rest of the state directory stays: node ids must be the same at the next mount. Repeating it is harmless.
    """
    for name in (MOUNT_FILE, COMMAND_FILE, SOCKET):
        (record.state_dir / name).unlink(missing_ok=True)
    remove_made(record.made)


def keep_unsent(record: MountRecord) -> None:
    """After an unmount that left changes: the mount is gone, its changes stay listed. Repeating it is harmless."""
    seen = {"name": record.name, "mountpoint": record.mountpoint, "location": record.location}
    write_json(record.state_dir / COMMAND_FILE, {**seen, "read_only": record.read_only})
    for name in (MOUNT_FILE, SOCKET):
        (record.state_dir / name).unlink(missing_ok=True)
    remove_made(record.made)


def remove_made(made: tuple[str, ...]) -> None:
    """Remove directories this command made; one that is in use by now stays."""
    for directory in made:
        try:
            os.rmdir(directory)
        except OSError:
            return


def is_server(pid: int) -> bool:
    """Whether a live process runs a mount server. Without /proc: whether the process lives."""
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
