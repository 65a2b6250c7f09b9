"""The steps that make a target path show a volume, computed from what is mounted now, hence idempotent. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from datastore.mountinfo import MountTable


@dataclass(frozen=True, slots=True)
class Unmount:
    """Unmount everything at the path."""

    path: str


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind-mount source at target."""

    source: str
    target: str
    read_only: bool


Step = Unmount | Bind


def publish(table: MountTable, source: str, target: str, *, read_only: bool) -> list[Step]:
    """Return the steps after which `target` shows the mount at `source`; none when it does so already.

    A target with another device belongs to an earlier mount that died, and is mounted again. So is a target with
    several layers of mounts, or a target that is writable but must not be.
    """
    there, wanted = table.at(target), table.at(source)
    bind = Bind(source, target, read_only)
    if there is None:
        return [bind]
    shows = wanted is not None and there.device == wanted.device
    # A read-only target that may be writable by now stays: its volume was read-only before, and a pod uses the target.
    if shows and (there.read_only or not read_only) and table.count(target) == 1:
        return []
    return [Unmount(target), bind]
