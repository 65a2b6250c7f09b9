"""Makes, changes and withdraws exports on an NFS host. ssh.py sends this file there, and the host's own Python runs it.

It needs only the standard library of Python 3.8 or later, `exportfs` and `rm`. The request is one JSON document on
standard input, the answer one on standard output. No shell sees a value of the request; command lines have only the
checked name of the directory.

Below the export root each Datastore has one directory NAMESPACE_NAME_UID that only root can enter:

    owner.json      for whom it was made, its number (project id of the quota, and fsid), its export options
    data/           what is exported, with the quota

and there is one file /etc/exports.d/datastore-UID.exports. A directory is made under another name and then renamed, so
that it is never incomplete; the next run removes what an interrupted run left. A directory without this Datastore's
mark is never touched, and no symbolic link below the root is followed.
Sources: exports(5), exportfs(8), quotactl(2), ioctl_xfs_fsgetxattr(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    JSON = dict[str, Any]

EXPORTS = Path("/etc/exports.d")
EXPORT_TABLE = Path("/var/lib/nfs/etab")
SERVER_THREADS = Path("/proc/fs/nfsd/threads")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
LOCK = ".datastore.lock"
UNFINISHED, PROBE, DELETED, ARCHIVED, CLIENTS = ".new_", ".datastore.probe-", ".deleted_", "archived_", ".clients_"
MARK = "owner.json"
LEFT_S = 1.5
"""How much of a request's time a command leaves for the rest; the wait for the lock leaves twice as much."""
READ = ".datastore-read"
"""A file in EXPORTS whose time is that at which the last exportfs that has ended began: it has read all older files."""
NO_COMMAND = 127
EXPORTFS = f"timeout 300 exportfs -ra; said=$?; [ $said -ge 124 ] || mv -f {READ}.new {READ}; exit $said"
"""timeout only ends a hang, as when exportfs asks for a name of /etc/exports and no name server answers. Its own
statuses begin at 124, and NO_COMMAND is that of a command that is not there."""
BLOCK = 4096
FEWEST_FILES = 65536
"""The quota allows this many files and one more for each block: empty files take no block, so they need a limit too."""
NOBODY = 65534
_DIRECTORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_PLAIN = re.compile(rb"[A-Za-z0-9/._-]")
# linux/fs.h: struct fsxattr is xflags, extsize, nextents, projid, cowextsize, 8 bytes.
_FSXATTR = struct.Struct("=IIIII8s")
_GET_XATTR, _SET_XATTR, _INHERIT = 0x801C581F, 0x401C5820, 0x200
# linux/dqblk_xfs.h: struct fs_disk_quota is version, flags, which limits are given, id, the hard and the soft limit of
# blocks, those of files, blocks and files in use, and 56 bytes of times, warnings and the realtime device.
_DISK_QUOTA = struct.Struct("=bBHI6Q56x")
_QUOTA_BLOCK, _PROJECT = 512, 2
_GET_QUOTA, _SET_LIMITS, _GET_STATE = 0x5803, 0x5804, 0x5805
_HARD_LIMITS, _ENFORCED = 1 << 1 | 1 << 3, 1 << 5


class Refused(Exception):
    """An error that is the answer. kind: a class of datastore.errors; the text is for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Place:
    """The export root and one Datastore's directory in it, from a request. Use it in a `with` block."""

    def __init__(self, request: JSON) -> None:
        self.directory: str = request["directory"]
        self.uid: str = request["uid"]
        if not _DIRECTORY.fullmatch(self.directory) or not _WORD.fullmatch(self.uid):
            raise Refused("InvalidRequest", f"no name of a directory: {self.directory[:300]!r}")
        given: str = request["root"]
        try:
            self.root = os.open(given, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Refused("InvalidRequest", f"root {given}: {error.strerror}; make it, owned by root") from None
        found = os.fstat(self.root)
        if found.st_uid != 0 or found.st_mode & 0o022:
            raise Refused("InvalidRequest", f"root {given} must belong to root, and nobody else may write to it")
        self.until = time.monotonic() + request["limit_s"]
        self.path = os.readlink(f"/proc/self/fd/{self.root}")
        self.exports = EXPORTS / f"datastore-{self.uid}.exports"

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.root)

    def open(self, *names: str) -> int | None:
        """Open a directory below the root, name by name; None if there is none. Errors: Refused for a link or file."""
        opened = os.dup(self.root)
        try:
            for name in names:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
                os.close(opened)
                opened = below
        except OSError as error:
            os.close(opened)
            if error.errno == errno.ENOENT:
                return None
            where = "/".join((self.path, *names))
            raise Refused("InvalidRequest", f"{where} is no directory of ours: {error.strerror}") from None
        return opened

    def mark(self, directory: str) -> JSON | None:
        """Return a directory's mark (owner.json); None if it can't be read. Errors: Refused for a link or a file."""
        opened = self.open(directory)
        if opened is None:
            return None
        try:
            return _read(opened, MARK)
        finally:
            os.close(opened)

    def owned(self, directory: str) -> JSON | None:
        """Return the mark of a directory; None if there is none. Errors: Refused if it is not this Datastore's."""
        with _closing(self.open(directory)) as opened:
            if opened is None:
                return None
            mark = _read(opened, MARK)
        if mark is None or mark.get("uid") != self.uid:
            whose = "has no mark of ours" if mark is None else "belongs to another Datastore"
            raise Refused("AlreadyExists", f"{self.path}/{directory} {whose}; it stays as it is")
        return mark

    def marks(self) -> Iterator[JSON]:
        """Yield the marks of all directories below the root, with the directory's name."""
        for name in os.listdir(self.root):
            if name.startswith("."):
                continue
            with contextlib.suppress(Refused):
                mark = self.mark(name)
                if mark is not None:
                    yield {**mark, "directory": name}


def ensure(request: JSON) -> JSON:
    """Make the directory, its quota and its export, as far as they are not as requested.

    made (in the request): the directory was made before, so its absence is an error: its disk may not be mounted.
    """
    with Place(request) as place, _locked(place):
        _sweep(place)
        mark = place.owned(place.directory)
        wanted = {name: request[name] for name in ("uid", "namespace", "name", "class", "options")}
        if mark is None:
            if request["made"]:
                text = f"{place.path}/{place.directory} is gone: is its disk mounted? It is not recreated"
                raise Refused("NotFound", text)
            mark = _make(place, request, {**wanted, "number": _number(place), "exported": True})
        elif mark != {**mark, **wanted, "exported": True}:
            mark = _note(place, {**mark, **wanted, "exported": True})
        with _closing(place.open(place.directory, "data")) as data:
            if data is None:
                raise Refused("NotFound", f"{place.path}/{place.directory}/data is gone; restore it")
            answer: JSON = {"path": f"{place.path}/{place.directory}/data"}
            if request["quota"]:
                size, files = _limit(place, mark["number"], request["capacity"])
                _check_project(data, answer["path"], mark["number"])
                # One of the files is the directory itself, which is no file of the user's.
                answer = {**answer, "bytes": size, "files": max(0, files - 1)}
        _export(place, mark, request["clients"])
        return answer


def release(request: JSON) -> JSON:
    """Withdraw the export, then keep, rename or remove the data by the policy. done False: call again for the rest."""
    policy, directory = request["policy"], request["directory"]
    with Place(request) as place:
        with _locked(place):
            _sweep(place)
            where = f"{place.path}/{directory}"
            try:
                mark = place.owned(directory)
            except Refused as error:
                if error.kind != "AlreadyExists":
                    raise
                _withdraw(place)
                return {"done": True, "message": str(error)}
            if mark is None and place.exports.exists():
                text = f"{where} is gone: is its disk mounted? If you removed it, remove {place.exports} too"
                raise Refused("NotFound", text)
            _withdraw(place)
            if mark is not None:
                _note(place, {**mark, "exported": False})
            if policy == "Retain" or (policy == "Archive" and mark is None):
                stays = f"{where}/data stays (reclaimPolicy {policy}), and is not exported any more"
                return {"done": True, "message": stays if mark else f"{where} is gone already"}
            if policy == "Archive":
                os.rename(directory, ARCHIVED + directory, src_dir_fd=place.root, dst_dir_fd=place.root)
                os.fsync(place.root)
                return {"done": True, "message": f"{where} was renamed to {place.path}/{ARCHIVED}{directory}"}
            if mark is not None:
                os.rename(directory, DELETED + directory, src_dir_fd=place.root, dst_dir_fd=place.root)
                os.fsync(place.root)
        removed = place.owned(DELETED + directory)
        if removed is None:
            return {"done": True, "message": f"{where} was removed"}
        # This is done without the lock: it may take long, and nobody else uses this name. The mark goes last.
        if not all(_remove(place, name) for name in (f"{DELETED}{directory}/data", DELETED + directory)):
            return {"done": False, "message": f"removing {where}"}
        if request["quota"]:
            _limit(place, removed["number"], None)
        if not any(each.get("class") == removed["class"] for each in place.marks()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(CLIENTS + removed["class"], dir_fd=place.root)
        return {"done": True, "message": f"{where} was removed"}


def probe(request: JSON) -> JSON:
    """Return what a directory can do. program (in the request): the text of datastore/backends/volumeprobe.py."""
    names: JSON = {"__name__": "volumeprobe"}
    with Place(request) as place, _locked(place):
        exec(compile(request["program"], "volumeprobe", "exec"), names)  # noqa: S102  (ours, over our own connection)
        return {"capabilities": names["capabilities"](Path(place.path))}


def _make(place: Place, request: JSON, mark: JSON) -> JSON:
    """Make a directory with its quota under another name, and rename it when it is complete."""
    staging = UNFINISHED + place.directory
    os.mkdir(staging, 0o700, dir_fd=place.root)
    try:
        _fill(place, staging, request, mark)
    except Refused:
        _remove(place, staging)
        raise
    os.rename(staging, place.directory, src_dir_fd=place.root, dst_dir_fd=place.root)
    os.fsync(place.root)
    return mark


def _fill(place: Place, staging: str, request: JSON, mark: JSON) -> None:
    with _closing(place.open(staging)) as opened:
        assert opened is not None, "it was just made"
        os.mkdir("data", 0o700, dir_fd=opened)
        with _closing(place.open(staging, "data")) as data:
            assert data is not None, "it was just made"
            if request["quota"]:
                _set_project(place, data, mark["number"])
                _limit(place, mark["number"], request["capacity"])
            os.fchown(data, request["owner"], request["group"])
            os.fchmod(data, request["mode"])
            os.fsync(data)
        _write(opened, MARK, mark)


def _note(place: Place, mark: JSON) -> JSON:
    """Replace the mark of the Datastore's directory."""
    with _closing(place.open(place.directory)) as opened:
        assert opened is not None, "its mark was just read"
        _write(opened, MARK, mark)
    return mark


def _sweep(place: Place) -> None:
    """Remove what interrupted runs left. The caller holds the lock, so no other run is using these names."""
    for name in os.listdir(place.root):
        if name.startswith((UNFINISHED, PROBE)):
            _remove(place, name)


def _number(place: Place) -> int:
    """Return project id and fsid: made from the uid, to be the same on every try, but not equal to another's."""
    taken = {mark.get("number") for mark in place.marks()}
    texts = []
    for path in (EXPORT_TABLE, *EXPORTS.glob("*.exports")):
        with contextlib.suppress(FileNotFoundError):  # another run may remove its file now
            texts.append(path.read_text(errors="replace"))
    taken |= {int(found) for text in texts for found in re.findall(r"fsid=([0-9]{1,10})\b", text)}
    number = int.from_bytes(hashlib.sha256(place.uid.encode()).digest()[:4], "big") & 0x3FFFFFFF | 0x40000000
    while number in taken:
        number = number % 0x7FFFFFFF + 1
    return number


def _set_project(place: Place, directory: int, number: int) -> None:
    """Let all files that are made in the directory from now on count for this project."""
    try:
        flags, extent, count, _, copied, rest = _attributes(directory)
        fcntl.ioctl(directory, _SET_XATTR, _FSXATTR.pack(flags | _INHERIT, extent, count, number, copied, rest))
    except OSError as error:
        raise Refused("InvalidRequest", f"{_no_quota(place)} ({error.strerror})") from None


def _check_project(directory: int, path: str, number: int) -> None:
    """Refuse a directory whose new files don't count for this project, as one that a backup has restored."""
    flags, _, _, project, _, _ = _attributes(directory)
    if project != number or not flags & _INHERIT:
        command = f"xfs_quota -x -c 'project -s -p {path} {number}'"
        raise Refused("InvalidRequest", f"{path} does not count for its quota; let it, and what is in it: {command}")


def _attributes(directory: int) -> tuple[Any, ...]:
    attributes = bytearray(_FSXATTR.size)
    fcntl.ioctl(directory, _GET_XATTR, attributes)
    return _FSXATTR.unpack(bytes(attributes))


def _limit(place: Place, number: int, capacity: int | None) -> tuple[int, int]:
    """Limit the bytes and the files of a project (None: no limit); return how many it has of both.

    What statvfs(2) shows is less than the limit where the disk has less room. Errors: Refused without quotas.
    """
    blocks = -(-capacity // BLOCK) * (BLOCK // _QUOTA_BLOCK) if capacity else 0
    files = blocks * _QUOTA_BLOCK // BLOCK + FEWEST_FILES if capacity else 0
    try:
        state = _quotactl(place, _GET_STATE, number, bytes(_DISK_QUOTA.size))
        if not int.from_bytes(state[2:4], sys.byteorder) & _ENFORCED:
            raise OSError(errno.ENOSYS, "its project quotas are not enforced")
        try:
            found = _DISK_QUOTA.unpack(_quotactl(place, _GET_QUOTA, number, bytes(_DISK_QUOTA.size)))
        except FileNotFoundError:
            found = (0,) * 10
        _, _, _, _, blocks_limit, _, files_limit, _, blocks_used, files_used = found
        if (blocks_limit, files_limit) != (blocks, files):
            limits = _DISK_QUOTA.pack(1, _PROJECT, _HARD_LIMITS, number, blocks, 0, files, 0, 0, 0)
            _quotactl(place, _SET_LIMITS, number, limits)
    except OSError as error:
        raise Refused("InvalidRequest", f"{_no_quota(place)} ({error.strerror})") from None
    return blocks_used * _QUOTA_BLOCK, files_used


def _quotactl(place: Place, command: int, number: int, argument: bytes) -> bytes:
    """Do one call of quotactl(2) about project quotas of the root's file system; return its argument afterwards."""
    device = os.fstat(place.root).st_dev
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounted = f"{os.major(device)}:{os.minor(device)}"
    source = next((each[each.index("-") + 2] for each in mounts if each[2] == mounted), "")
    buffer = ctypes.create_string_buffer(argument, len(argument))
    called = ctypes.CDLL(None, use_errno=True).quotactl(command << 8 | _PROJECT, os.fsencode(source), number, buffer)
    if called:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw


def _no_quota(place: Place) -> str:
    return f"root {place.path} is on no XFS mounted with prjquota: mount it so, or set quota: none in the class"


def _export(place: Place, mark: JSON, clients: Sequence[str]) -> None:
    """Let the server export the directory to these clients and no others.

    The clients are those of the whole class: when they change, the exports of all its Datastores are changed at once.
    """
    known = CLIENTS + mark["class"]
    if not _WORD.fullmatch(mark["class"]):
        raise Refused("InvalidRequest", f"no uid of a StorageClass: {mark['class'][:100]!r}")
    concerned = [{**mark, "directory": place.directory}]
    if _read(place.root, known) != {"clients": clients}:
        concerned = [each for each in place.marks() if each.get("class") == mark["class"] and each.get("exported")]
    EXPORTS.mkdir(exist_ok=True)
    before: dict[Path, str | None] = {}
    for each in concerned:
        path, text = EXPORTS / f"datastore-{each['uid']}.exports", _lines(place, each, clients)
        before[path] = path.read_text() if path.exists() else None
        if before[path] != text:
            _replace(path, text)
    wanted = set(clients)
    said = ""
    if not _was_read(place.exports) or _served(place) != wanted:
        said = _exportfs(place)
    if _served(place) != wanted:
        if before.get(place.exports) is None:
            place.exports.unlink()
        _check_others(place, wanted, said)
        raise Refused("InvalidRequest", f"exportfs did not export {place.path}/{place.directory}/data: {said}")
    _write(place.root, known, {"clients": clients})
    if not SERVER_THREADS.exists() or SERVER_THREADS.read_text().strip() in ("", "0"):
        raise Refused("Unreachable", "the NFS server is not running: systemctl start nfs-server")


def _lines(place: Place, mark: JSON, clients: Sequence[str]) -> str:
    path = _escaped(place, mark["directory"])
    options = f"{mark['options']},fsid={int(mark['number'])}"
    head = f"# Datastore {mark['namespace']}/{mark['name']}; written by its controller, changes are lost\n"
    return head + "".join(f"{path} {client}({options})\n" for client in clients)


def _escaped(place: Place, directory: str) -> str:
    """Return the path of the data for exports(5), with octal escapes for all but plain characters."""
    raw = os.fsencode(f"{place.path}/{directory}/data")
    return "".join(chr(byte) if _PLAIN.match(bytes((byte,))) else f"\\{byte:03o}" for byte in raw)


def _served(place: Place) -> set[str]:
    """Return the Datastore's clients in the server's table of lines PATH, tab, CLIENT(OPTIONS), with octal escapes."""
    path = os.fsencode(f"{place.path}/{place.directory}/data")
    found = set()
    for line in EXPORT_TABLE.read_bytes().splitlines() if EXPORT_TABLE.exists() else []:
        exported, _, client = line.partition(b"\t")
        if re.sub(rb"\\([0-7]{3})", lambda code: bytes((int(code[1], 8),)), exported) == path:
            found.add(os.fsdecode(client.partition(b"(")[0]))
    return found


def _check_others(place: Place, wanted: set[str], said: str) -> None:
    """Refuse other clients of the Datastore's directory, which no file of ours lets in. said: by exportfs."""
    if others := ", ".join(sorted(_served(place) - wanted)):
        text = f"{place.path}/{place.directory}/data is exported to {others} too: take it out of /etc/exports and of"
        raise Refused("InvalidRequest", f"{text} other files in /etc/exports.d (exportfs: {said})")


def _withdraw(place: Place) -> None:
    """Let the server stop the export of the Datastore's directory."""
    there = place.exports.exists()
    for path in (place.exports, _unfinished(place.exports)):
        path.unlink(missing_ok=True)
    if there or _served(place):
        _check_others(place, set(), _exportfs(place))


def _was_read(exports: Path) -> bool:
    """Return whether exportfs has read this file since it was written."""
    read = EXPORTS / READ
    return read.exists() and exports.stat().st_mtime_ns < read.stat().st_mtime_ns


def _exportfs(place: Place) -> str:
    """Let the server read all files of exports; return what exportfs says.

    Its time grows with the exports of the host and their clients. If this request has no more time, exportfs goes on
    and holds the lock, and a later run finds what it did; meanwhile runs that change no export are not hindered.
    """
    begun = EXPORTS / f"{READ}.new"
    with _closing(os.open(EXPORTS, os.O_RDONLY | os.O_DIRECTORY)) as lock, tempfile.TemporaryFile() as said:
        assert lock is not None, "it was just opened"
        until = min(place.until - 2 * LEFT_S, time.monotonic() + LEFT_S)
        _lock(lock, until, "exportfs is at work on an earlier change")
        begun.touch()
        os.utime(begun, ns=(time.time_ns(), time.time_ns()))
        process = subprocess.Popen(
            ("sh", "-c", EXPORTFS),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={"PATH": PATH, "LC_ALL": "C"},
            cwd=EXPORTS,
            pass_fds=(lock,),
            start_new_session=True,
        )
        limit_s = max(0.5, place.until - time.monotonic() - LEFT_S)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            text = f"exportfs takes longer than {limit_s:.0f} s for all exports and their clients, and goes on"
            raise Refused("Throttled", text) from None
        if process.returncode == NO_COMMAND:
            raise Refused("InvalidRequest", "exportfs is missing on the NFS host; install it")
        said.seek(0)
        return _said(said.read().decode(errors="replace"), process.returncode)


def _remove(place: Place, name: str) -> bool:
    """Remove a directory of the root with its content; return False if the time was too short for all of it."""
    try:
        done = subprocess.run(
            ("rm", "-rf", "--one-file-system", "--", name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={"PATH": PATH, "LC_ALL": "C"},
            cwd=f"/proc/self/fd/{place.root}",
            pass_fds=(place.root,),
            timeout=max(0.5, place.until - time.monotonic() - LEFT_S),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        raise Refused("ServerFault", f"{place.path}/{name} can't be removed: {_said(done.stderr, done.returncode)}")
    os.fsync(place.root)
    return True


def _said(text: str, status: int) -> str:
    return " ".join(text.split())[:500] or f"status {status}"


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[None]:
    """Hold the lock by which one run at a time works below a root. Errors: Refused when another run takes too long."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with _closing(os.open(LOCK, flags, 0o600, dir_fd=place.root)) as opened:
        assert opened is not None, "it was just opened"
        _lock(opened, place.until - 2 * LEFT_S, f"{place.path} is being worked on by others")
        yield


def _lock(opened: int, until: float, busy: str) -> None:
    """Lock an open file. Errors: Refused with the text `busy` when somebody else holds the lock all the time."""
    while True:
        try:
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise Refused("Throttled", busy) from None
            time.sleep(0.02)


@contextlib.contextmanager
def _closing(opened: int | None) -> Iterator[int | None]:
    try:
        yield opened
    finally:
        if opened is not None:
            os.close(opened)


def _read(directory: int, name: str) -> JSON | None:
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    with open(opened, "rb") as file:
        try:
            found = json.loads(file.read())
        except ValueError:
            return None
    return found if isinstance(found, dict) else None


def _write(directory: int, name: str, document: JSON) -> None:
    """Write a JSON file, completely or not at all; it is on the disk when this returns."""
    fresh = f"{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(fresh, flags, 0o600, dir_fd=directory), "w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _replace(path: Path, text: str) -> None:
    """Replace a file as _write() does. exportfs ignores the temporary file, whose name begins with a dot."""
    fresh = _unfinished(path)
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(fresh, path)
    with _closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)) as opened:
        assert opened is not None, "it was just opened"
        os.fsync(opened)


def main() -> None:
    """Read one request, and write the answer."""
    request = json.loads(sys.stdin.buffer.read())
    # If the host hangs, this process ends before the controller tries again.
    signal.alarm(int(request["limit_s"]))
    os.umask(0o077)
    try:
        if os.geteuid() != 0:
            raise Refused("CredentialsInvalid", "username of the Secret has to be root")
        answer = {"ensure": ensure, "release": release, "probe": probe}[request["operation"]](request)
    except Refused as error:
        answer = {"error": error.kind, "message": str(error)}
    except OSError as error:
        kind = "OutOfSpace" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "ServerFault"
        answer = {"error": kind, "message": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
