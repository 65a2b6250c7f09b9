"""A mount namespace of its own for each replica: the machine as it is, and the Datastores at their absolute paths.

`bwrap` (bubblewrap) makes it; a user who is not root gets a user namespace with it. `planned` decides, purely, from
what the machine has, how a path comes to be:

- a directory that is there is covered;
- one that would have to be made in / is made in a root directory of the replica's own;
- one that would have to be made where this user may write is made on the machine, and stays, empty;
- one that would have to be made elsewhere (/mnt/data for a plain user) is made in a copy of that directory, in which
  the same files show, and which is read-only: what is written there would be lost.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from datastore.errors import DatastoreError

MAX_ENTRIES = 256
"""Of a directory that is copied: each entry is a mount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What stands at an absolute path of the replica: a directory or a file of the machine."""

    source: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a directory of the machine. link: the target of a symbolic link, else ''."""

    name: str
    link: str = ""


class Machine:
    """What the machine has at a path; the plan asks nothing else."""

    def is_dir(self, path: str) -> bool:
        """Whether a directory is there, links followed."""
        return os.path.isdir(path)

    def writable(self, path: str) -> bool:
        """Whether this user may make entries in it."""
        return os.access(path, os.W_OK | os.X_OK)

    def entries(self, path: str) -> list[Entry]:
        """What is in it."""
        with os.scandir(path) as found:
            return sorted(
                (Entry(name=each.name, link=os.readlink(each.path) if each.is_symlink() else "") for each in found),
                key=lambda each: each.name,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Arguments of bwrap, and directories to make on the machine first."""

    arguments: tuple[str, ...]
    made: tuple[str, ...] = ()


def planned(shown: Mapping[str, Shown], machine: Machine) -> Plan:
    """How to show these sources at these absolute paths. Errors: DatastoreError."""
    copied: dict[str, str] = {}
    made: list[str] = []
    inside: list[str] = []
    for path in sorted(shown):  # a parent goes before what is below it
        covered = next((each for each in inside if path.startswith(each + "/")), "")
        if not covered and not machine.is_dir(path):
            parent = _nearest(path, machine)
            if parent == "/" or not machine.writable(parent):
                copied.setdefault(parent, path)
            else:
                made.append(path)
        inside.append(path)
    arguments: list[str] = []
    if "/" not in copied:
        arguments += ["--dev-bind", "/", "/"]
    for parent in sorted(copied):
        arguments += _copy(parent, copied[parent], machine)
    arguments += ["--proc", "/proc"]
    for path in sorted(shown):
        arguments += ["--ro-bind" if shown[path].read_only else "--dev-bind", shown[path].source, path]
    for parent in sorted(copied):
        arguments += ["--remount-ro", parent]
    return Plan(arguments=tuple(arguments), made=tuple(made))


def _nearest(path: str, machine: Machine) -> str:
    """The deepest directory above a path that is there."""
    parent = os.path.dirname(path)
    while not machine.is_dir(parent):
        parent = os.path.dirname(parent)
    return parent


def _copy(parent: str, path: str, machine: Machine) -> list[str]:
    entries = machine.entries(parent)
    if len(entries) > MAX_ENTRIES:
        raise DatastoreError(
            f"{path}: this directory is not there, and can't be shown in {parent}, which has {len(entries)} entries; "
            f"make it (sudo mkdir -p {path}), or choose another path"
        )
    arguments = ["--tmpfs", parent]
    for entry in entries:
        whole = os.path.join(parent, entry.name)
        if whole == "/proc":
            continue
        arguments += ["--symlink", entry.link, whole] if entry.link else ["--dev-bind-try", whole, whole]
    return arguments


def command_line(plan: Plan, command: Sequence[str], working_dir: str) -> list[str]:
    """bwrap with the plan; all that the command starts ends with it, and with us. Errors: DatastoreError."""
    program = shutil.which("bwrap")
    if program is None:
        raise DatastoreError(
            "bwrap is not on PATH: apt-get install bubblewrap (dnf install bubblewrap); a job needs it to see its "
            "Datastores at their paths"
        )
    isolated = ["--unshare-pid", "--die-with-parent"]
    return [program, *plan.arguments, *isolated, "--chdir", working_dir, "--", *command]


def to_source(path: str, shown: Mapping[str, Shown]) -> str:
    """Where something that the replica sees at an absolute path is on the machine."""
    for target in sorted(shown, key=len, reverse=True):
        if path == target or path.startswith(target + "/"):
            return shown[target].source + path[len(target) :]
    return path


def find_program(word: str, search: str, working_dir: str, source_of: Callable[[str], str]) -> str:
    """Why a command can't be started, as 'no such command', or '' when it can. search: PATH of the replica."""
    if "/" in word:
        places = [os.path.normpath(os.path.join(working_dir, word))]
    else:
        places = [os.path.join(directory, word) for directory in search.split(os.pathsep) if directory]
    found = [source_of(place) for place in places if os.path.exists(source_of(place))]
    if not found:
        return "no such command" if "/" in word else f"no such command on PATH ({search})"
    if not any(os.access(each, os.X_OK) and stat.S_ISREG(os.stat(each).st_mode) for each in found):
        return "can't be executed: it is no program, or its x bit is not set"
    return ""
