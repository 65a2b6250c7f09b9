"""Every code path that writes, as a scenario: objects before, preparation, action under faults, objects after."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from datastore.fuse.loop import all_of
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from tests.driving import resolve
from tests.localfs import LocalFs

PART = 8192
"""Size of a part in these tests; SINGLE_MAX is the same."""
LARGE = bytes(range(256)) * 160
"""Five parts."""
NEW = b"new content"


def _nothing(local: LocalFs) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Scenario:
    """before, after: bodies by key. Markers of parent directories may appear in either (S-02).

    prepare: runs without faults; its result is given to act. act: runs under faults; when it fails and the journal has
    been worked off, the bucket must be as before or after, or in a state that the fields below allow.
    """

    name: str
    before: Mapping[str, bytes]
    act: Callable[[LocalFs, Any], None]
    after: Mapping[str, bytes]
    prepare: Callable[[LocalFs], Any] = _nothing
    finish: Callable[[LocalFs, Any], None] = field(default=lambda local, prepared: None)
    """Runs without faults after everything else, to close what prepare opened."""
    still_read: bytes | None = None
    """The content that the file that prepare opened shows, whatever happens."""
    moves: bool = False
    """A failure that is reported may leave what is renamed under both names."""
    halfway: tuple[Mapping[str, bytes], ...] = ()
    """Other states in which a failure may leave the bucket."""
    when_killed: tuple[Mapping[str, bytes], ...] = ()
    """Other results that are right when the server is killed."""
    mount: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the MountSpec."""


def write(path: str, body: bytes) -> Callable[[LocalFs, Any], None]:
    return lambda local, _: local.write(path, body)


def rename(old: str, new: str) -> Callable[[LocalFs, Any], None]:
    return lambda local, _: local.rename(old, new)


def unlink(path: str) -> Callable[[LocalFs, Any], None]:
    return lambda local, _: local.unlink(path)


def opened(
    path: str, flags: int = 0, body: bytes = NEW, at: int = 0, *, sync: bool = False
) -> Callable[[LocalFs, Any], None]:
    """Return an act that opens a file, writes to it and closes it."""

    def act(local: LocalFs, _: Any) -> None:
        with local.opened(path, os.O_RDWR | flags) as file:
            file.write(body, at)
            if sync:
                file.fsync()

    return act


def _open(path: str, flags: int = os.O_RDONLY) -> Callable[[LocalFs], Any]:
    return lambda local: local.open(path, flags)


def _close(local: LocalFs, file: Any) -> None:
    file.close()


def _dirty(local: LocalFs) -> Any:
    file = local.open("d/f", os.O_RDWR)
    file.write(NEW)
    file.truncate(len(NEW))
    return file


def _stream(local: LocalFs) -> Any:
    """Return an open file whose upload in parts has begun."""
    file = local.open("d/f", os.O_RDWR | os.O_TRUNC)
    for at in range(0, len(LARGE), PART // 2):
        file.write(LARGE[at : at + PART // 2], at)
    return file


def _write_slowly(local: LocalFs, _: Any) -> None:
    _stream(local).close()


def _write_and_change(local: LocalFs, _: Any) -> None:
    """Write the header of a file last, and change attributes with which its upload was begun."""
    file = _stream(local)
    try:
        file.write(b"HEAD", 0)
        local.chmod("d/f", 0o600)
    finally:
        file.close()


def _two_closed_behind(local: LocalFs) -> str:
    local.write("d/f", NEW)
    local.write("d/new", LARGE)
    return "closed"


def _closed_behind(local: LocalFs) -> str:
    local.write("d/new", NEW)
    return "d/new"


def _rename_behind(local: LocalFs, path: Any) -> None:
    local.rename(path, "d/newer")
    _send_behind(local)


def _send_behind(local: LocalFs, _: Any = None) -> None:
    """Send what waits; raise an error if something could not be sent, so that the sweep handles it as any other."""
    fs = cast(DatastoreFilesystem, local.fs)
    resolve(all_of(fs.loop.call(lambda: fs.upkeep.send_due(float("inf")))))
    if fs.uploads.unsent():
        raise OSError(errno.EIO, "not sent")


REFUSING: Mapping[str, Any] = {"conflict": "fail"}
BEHIND: Mapping[str, Any] = {"write_back_s": 5.0}
TREE = {"d/": b"", "d/f": b"old", "d/e/": b"", "d/e/g": b"deep", "d/l.rclonelink": b"f", "other": b"untouched"}
MOVED = {"m" + key[1:] if key.startswith("d/") else key: body for key, body in TREE.items()}
BIG = {"big": LARGE, "other": b"untouched"}
PATCHED = LARGE[: PART * 2 + 100] + b"XYZ" + LARGE[PART * 2 + 103 :]


def without(*keys: str) -> dict[str, bytes]:
    """TREE without some keys."""
    return {key: body for key, body in TREE.items() if key not in keys}


STREAMED = {**TREE, "d/f": LARGE}
CHANGED = {**TREE, "d/f": NEW}
TAIL = opened("big", body=b"tail", at=len(LARGE))
EXCLUSIVE = opened("f", os.O_CREAT | os.O_EXCL)
SCENARIOS = (
    Scenario("create", {}, write("f", NEW), {"f": NEW}),
    Scenario("create in directory", TREE, write("d/new", NEW), {**TREE, "d/new": NEW}),
    Scenario("create exclusively", TREE, EXCLUSIVE, {**TREE, "f": NEW}, halfway=({**TREE, "f": b""},)),
    Scenario("fsync", TREE, opened("f", os.O_CREAT, sync=True), {**TREE, "f": NEW}),
    Scenario("replace", TREE, write("d/f", NEW), CHANGED),
    Scenario("create large", TREE, write("big", LARGE), {**TREE, "big": LARGE}),
    Scenario("stream", TREE, _write_slowly, STREAMED),
    Scenario("stream and change", TREE, _write_and_change, {**TREE, "d/f": b"HEAD" + LARGE[4:]}),
    Scenario("unlink a stream", TREE, unlink("d/f"), without("d/f"), _stream, _close, LARGE, halfway=(STREAMED,)),
    Scenario(
        *("rename a stream", TREE, rename("d/f", "new"), {**without("d/f"), "new": LARGE}, _stream, _close, LARGE),
        halfway=(STREAMED,),
        moves=True,
    ),
    Scenario("replace or fail", TREE, write("d/f", NEW), CHANGED, mount=REFUSING),
    Scenario("create or fail", TREE, write("f", NEW), {**TREE, "f": NEW}, mount=REFUSING),
    Scenario("append or fail", BIG, TAIL, {**BIG, "big": LARGE + b"tail"}, mount=REFUSING),
    Scenario("stream or fail", TREE, _write_slowly, STREAMED, mount=REFUSING),
    Scenario(
        *("write behind", TREE, _send_behind, {**CHANGED, "d/new": LARGE}, _two_closed_behind),
        halfway=(CHANGED, {**TREE, "d/new": LARGE}, {**TREE, "d/new": b""}),
        mount=BEHIND,
    ),
    Scenario(
        *("rename behind", TREE, _rename_behind, {**TREE, "d/newer": NEW}, _closed_behind),
        halfway=({**TREE, "d/new": NEW},),
        mount=BEHIND,
        moves=True,
    ),
    Scenario("overwrite in the middle", BIG, opened("big", body=b"XYZ", at=PART * 2 + 100), {**BIG, "big": PATCHED}),
    Scenario("append", BIG, TAIL, {**BIG, "big": LARGE + b"tail"}),
    Scenario("truncate to nothing", BIG, lambda local, _: local.truncate("big", 0), {**BIG, "big": b""}),
    Scenario("truncate", BIG, lambda local, _: local.truncate("big", 100), {**BIG, "big": LARGE[:100]}),
    Scenario("extend", BIG, lambda local, _: local.truncate("big", len(LARGE) + 9), {**BIG, "big": LARGE + bytes(9)}),
    Scenario("chmod", TREE, lambda local, _: local.chmod("d/f", 0o600), TREE),
    Scenario("chmod directory", TREE, lambda local, _: local.chmod("d", 0o700), TREE),
    Scenario("setxattr", TREE, lambda local, _: local.setxattr("d/f", b"user.a", b"b"), TREE),
    Scenario("mkdir", TREE, lambda local, _: local.mkdir("d/new"), {**TREE, "d/new/": b""}),
    Scenario("rmdir", {**TREE, "d/new/": b""}, lambda local, _: local.rmdir("d/new"), TREE),
    Scenario("symlink", TREE, lambda local, _: local.symlink(b"t", "d/s"), {**TREE, "d/s.rclonelink": b"t"}),
    Scenario("mkfifo", TREE, lambda local, _: local.mknod("d/p", 0o010644), {**TREE, "d/p": b""}),
    Scenario("unlink", TREE, unlink("d/f"), without("d/f")),
    Scenario("unlink of the last entry", {"i/f": b"x"}, unlink("i/f"), {"i/": b""}),
    Scenario("unlink while open", TREE, unlink("d/f"), without("d/f"), _open("d/f"), _close, b"old"),
    Scenario("unlink while open, large", BIG, unlink("big"), {"other": b"untouched"}, _open("big"), _close, LARGE),
    Scenario("unlink unsent", TREE, unlink("d/f"), without("d/f"), _dirty, _close, NEW, halfway=(CHANGED,)),
    Scenario("rename", TREE, rename("d/f", "new"), {**without("d/f"), "new": b"old"}, moves=True),
    Scenario("rename over", TREE, rename("d/f", "other"), {**without("d/f"), "other": b"old"}, moves=True),
    Scenario(
        *("rename over an open file", TREE, rename("d/f", "other"), {**without("d/f"), "other": b"old"}),
        *(_open("other"), _close, b"untouched"),
        moves=True,
    ),
    Scenario(
        *("rename over an open file, large", BIG, rename("other", "big"), {"big": b"untouched"}),
        *(_open("big"), _close, LARGE),
        moves=True,
    ),
    Scenario(
        *("rename over a link", TREE, rename("d/f", "d/l"), {**without("d/f", "d/l.rclonelink"), "d/l": b"old"}),
        moves=True,
        when_killed=({**without("d/f"), "d/l": b"old"},),
    ),
    Scenario(
        *("rename unsent", TREE, rename("d/f", "new"), {**without("d/f"), "new": NEW}, _dirty, _close, NEW),
        halfway=(CHANGED,),
        moves=True,
    ),
    Scenario("rename large", BIG, rename("big", "new"), {"new": LARGE, "other": b"untouched"}, moves=True),
    Scenario("rename directory", TREE, rename("d", "m"), MOVED, moves=True),
    Scenario("rename directory over another", {**TREE, "m/": b""}, rename("d", "m"), MOVED, moves=True),
    Scenario(
        *("rename directory with unsent", TREE, rename("d", "m"), {**MOVED, "m/f": NEW}, _dirty, _close, NEW),
        halfway=(CHANGED, MOVED),
        moves=True,
    ),
)
