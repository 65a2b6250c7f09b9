"""Gives each replica a mount namespace, with the machine's files and the Datastores at their absolute paths.

`bwrap` (bubblewrap) makes the namespace, and a user namespace for a user who is not root. `planned` (pure) decides how
the path of a Datastore comes to exist, by the deepest directory above it that the machine has:

- If the path itself is a directory, the Datastore is mounted over it.
- If the deepest directory is /, the path is made in a root directory of the replica's own.
- If this user may write to the deepest directory, the path is made on the machine, and stays there, empty.
- Else (/mnt/data for a plain user) the path is made in a copy of the deepest directory. The copy shows the same files
  and is read-only, as new files in it would be lost.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from datastore.errors import DatastoreError

MAX_ENTRIES = 256
"""The most entries of a directory that is copied, as each entry becomes a mount."""
_MAX_LINKS = 40
"""The most symbolic links in a path, as in the kernel (path_resolution(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a replica sees at a path: the directory or file `source` of the machine."""

    source: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a directory of the machine. link: the target if it is a symbolic link, else ''."""

    name: str
    link: str = ""


class Machine:
    """The questions that planned() asks about the machine; tests give other answers."""

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory, or a symbolic link to one."""
        return os.path.isdir(path)

    def writable(self, path: str) -> bool:
        """Return whether this user may create entries in a directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def entries(self, path: str) -> list[Entry]:
        """Return the entries of a directory, by name."""
        with os.scandir(path) as found:
            return sorted(
                (Entry(name=each.name, link=os.readlink(each.path) if each.is_symlink() else "") for each in found),
                key=lambda each: each.name,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Arguments of bwrap, and the directories to make on the machine before it starts."""

    arguments: tuple[str, ...]
    made: tuple[str, ...] = ()


def planned(shown: Mapping[str, Shown], machine: Machine) -> Plan:
    """Plan how to show sources at absolute paths. Errors: DatastoreError when that can't be done at one of them."""
    copied: dict[str, str] = {}
    made: list[str] = []
    inside: list[str] = []
    for path in sorted(shown):  # a parent goes before what is below it
        covered = next((each for each in inside if path.startswith(each + "/")), "")
        if not covered and not machine.is_dir(path):
            parent = _nearest(path, machine)
            if parent == "/" or not machine.writable(parent):
                _check_free(parent, path, machine)
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
    """Return the deepest directory above a path that exists."""
    parent = os.path.dirname(path)
    while not machine.is_dir(parent):
        parent = os.path.dirname(parent)
    return parent


def _check_free(parent: str, path: str, machine: Machine) -> None:
    """Errors: DatastoreError when the path can't be made in a copy of `parent`, the deepest directory above it."""
    name = path.removeprefix(parent).strip("/").partition("/")[0]
    try:
        taken = any(each.name == name for each in machine.entries(parent))
    except OSError as error:
        raise DatastoreError(f"{path}: can't be shown: {parent}: {error.strerror}; choose another path") from error
    if taken:
        raise DatastoreError(
            f"{path}: can't be shown: {os.path.join(parent, name)} is no directory of this machine; choose another path"
        )


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
    """Return the bwrap command line: all processes of the command end with it and with us. Errors: DatastoreError."""
    program = shutil.which("bwrap")
    if program is None:
        raise DatastoreError(
            "bwrap is not on PATH: apt-get install bubblewrap (dnf install bubblewrap); a job needs it to see its "
            "Datastores at their paths"
        )
    isolated = ["--unshare-pid", "--die-with-parent"]
    return [program, *plan.arguments, *isolated, "--chdir", working_dir, "--", *command]


def to_source(path: str, shown: Mapping[str, Shown]) -> str:
    """Return the path on the machine of what the replica sees at an absolute path."""
    for target in sorted(shown, key=len, reverse=True):
        if path == target or path.startswith(target + "/"):
            return shown[target].source + path[len(target) :]
    return path


def followed(path: str, shown: Mapping[str, Shown]) -> str:
    """Return an absolute path without symbolic links: each is followed to where the replica finds its target."""
    ahead, at, links = _words(path), "", 0
    while ahead:
        word = ahead.pop()
        if word == "..":
            at = os.path.dirname(at)
            continue
        try:
            target = os.readlink(to_source(f"{at}/{word}", shown))
        except OSError:
            at = f"{at}/{word}"
            continue
        links += 1
        if links > _MAX_LINKS:
            return path
        at = "" if target.startswith("/") else at
        ahead += _words(target)
    return at or "/"


def _words(path: str) -> list[str]:
    """Return the words of a path, the last one first."""
    return [word for word in reversed(path.split("/")) if word not in ("", ".")]


def find_program(word: str, search: str, working_dir: str, source_of: Callable[[str], str]) -> str:
    """Return why a command can't be started, or ''. search: the replica's PATH. source_of: returns where something is
    on the machine that the replica sees at a path."""
    if "/" in word:
        places = [os.path.normpath(os.path.join(working_dir, word))]
    else:
        places = [os.path.join(working_dir, directory, word) for directory in search.split(os.pathsep) if directory]
    found = [source_of(place) for place in places if os.path.exists(source_of(place))]
    if not found:
        return "no such command" if "/" in word else f"no such command on PATH ({search})"
    if not any(os.access(each, os.X_OK) and stat.S_ISREG(os.stat(each).st_mode) for each in found):
        return "can't be executed: it is no program, or its x bit is not set"
    return ""
