"""Finds out the capabilities and the usage of a mounted volume: `python -m datastore.backends.volumeprobe DIR`.

It runs in a pod, tries each operation in a new directory, which it removes, and writes the result as one JSON object
into the container's termination message, which the controller can read without the right to read logs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROBE = ".datastore.probe-"
MESSAGE = Path("/dev/termination-log")
COUNT_S = 20.0
COUNT_MAX = 1_000_000
"""A volume that takes more seconds, or has more files, is not counted."""


def capabilities(root: Path) -> dict[str, bool]:
    """Return which operations work, tried in a new directory in root. Errors: OSError when root can't be written to."""
    base = root / f"{PROBE}{secrets.token_hex(8)}"
    base.mkdir()
    try:
        file = base / "a"
        file.write_bytes(b"one")
        return {
            "emptyDirs": _works(lambda: _empty(base / "d")),
            "symlinks": _works(lambda: _linked(base / "l")),
            "append": _works(lambda: _appended(file)),
            "chmod": _works(lambda: _moded(file)),
            "hardlinks": _works(lambda: _second(file, base / "h")),
            "rename": _works(lambda: _renamed(base)),
            "atomicRename": _works(lambda: _replaced(base)),
        }
    finally:
        shutil.rmtree(base, ignore_errors=True)


def usage(root: Path, clock: Callable[[], float] = time.monotonic) -> tuple[int, int] | None:
    """Return (files, bytes) below root; None when there are too many files, or some that can't be read."""
    files = size = 0
    until = clock() + COUNT_S

    def refuse(error: OSError) -> None:
        raise error

    with suppress(OSError):
        for folder, _, names in os.walk(root, onerror=refuse):
            if clock() > until or files > COUNT_MAX:
                return None
            for name in names:
                found = os.lstat(os.path.join(folder, name))
                files += 1
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
        return files, size
    return None


def main(argv: Sequence[str]) -> None:
    """Probe DIR and write the termination message. If DIR can't be probed, that is an answer, not a failure."""
    answer: dict[str, Any] = {}
    try:
        answer["capabilities"] = capabilities(Path(argv[0]))
        counted = usage(Path(argv[0]))
        if counted is not None:
            answer["objects"], answer["bytes"] = counted
    except OSError as error:
        answer = {"error": f"{error.strerror or error} (as uid {os.getuid()})"}
    MESSAGE.write_text(json.dumps(answer))


def _works(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except OSError:
        return False


def _empty(path: Path) -> bool:
    path.mkdir()
    return path.is_dir() and not list(path.iterdir())


def _linked(path: Path) -> bool:
    path.symlink_to("a")
    return os.readlink(path) == "a" and path.read_bytes() == b"one"


def _appended(file: Path) -> bool:
    with file.open("ab") as opened:
        opened.write(b" and two")
    return file.read_bytes() == b"one and two"


def _moded(file: Path) -> bool:
    file.chmod(0o600)
    private = stat.S_IMODE(file.stat().st_mode)
    file.chmod(0o644)
    return (private, stat.S_IMODE(file.stat().st_mode)) == (0o600, 0o644)


def _second(file: Path, other: Path) -> bool:
    os.link(file, other)
    return file.stat().st_nlink == 2 and other.read_bytes() == file.read_bytes()


def _renamed(base: Path) -> bool:
    (base / "r1").mkdir()
    (base / "r1" / "x").write_bytes(b"x")
    (base / "r1").rename(base / "r2")
    return (base / "r2" / "x").read_bytes() == b"x" and not (base / "r1").exists()


def _replaced(base: Path) -> bool:
    """As far as one client can tell: a renamed file keeps its inode, and a replaced one stays readable while open."""
    (base / "new").write_bytes(b"new")
    (base / "old").write_bytes(b"old")
    identity = (base / "new").stat().st_ino
    with (base / "old").open("rb") as opened:
        (base / "new").replace(base / "old")
        return (base / "old").stat().st_ino == identity and opened.read() == b"old"


if __name__ == "__main__":
    main(sys.argv[1:])
