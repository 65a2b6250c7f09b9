"""What to do so that a target shows a volume, from what is mounted now: idempotent by being computed anew. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from datastore.mountinfo import MountTable


@dataclass(frozen=True, slots=True)
class Unmount:
    """Take away whatever lies there."""

    path: str


@dataclass(frozen=True, slots=True)
class Bind:
    """Show what is at source also at target."""

    source: str
    target: str
    read_only: bool


Step = Unmount | Bind


def publish(table: MountTable, source: str, target: str, *, read_only: bool) -> list[Step]:
    """Steps after which `target` shows the mount at `source`; none when it does.

    A target that shows another device is of an earlier mount that died, and is replaced. Several layers, or a write
    where none may be, are replaced as well.
    """
    there, wanted = table.at(target), table.at(source)
    bind = Bind(source, target, read_only)
    if there is None:
        return [bind]
    shows = wanted is not None and there.device == wanted.device
    # One that is read-only although it need not be stays: its volume was so when it was shown, and a pod uses it.
    if shows and (there.read_only or not read_only) and table.count(target) == 1:
        return []
    return [Unmount(target), bind]
