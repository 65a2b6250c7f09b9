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
    # A read-only mount shows read-only without a flag of its own; more than was asked for is refused to nobody.
    as_asked = there.read_only == (read_only or (wanted is not None and wanted.read_only))
    if shows and as_asked and table.count(target) == 1:
        return []
    return [Unmount(target), bind]
