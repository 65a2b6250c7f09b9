"""Export a version to a directory, a bucket or a tar file. Every byte that is read is compared with the manifest.

Directories, tar files and image layouts appear when they are whole. What an interrupted export to a directory or a
bucket had written is read again, and is kept if it is right; other forms begin anew.
"""

from __future__ import annotations

import json
import os
import secrets
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol

from datastore.errors import AccessDenied, AlreadyExists, NotFound, PreconditionFailed, StoreError
from datastore.models import owner
from datastore.models.directory import DirectoryStorage, DirectoryTree, storage_errors
from datastore.models.errors import SourceChanged, VersionDamaged
from datastore.models.manifest import Entry, VersionManifest
from datastore.models.progress import Progress, can_resume
from datastore.models.registry import Models
from datastore.models.storage import Body, Node, ReadableTree, Tree, compare
from datastore.models.transfer import Transfer

Form = Literal["directory", "tar", "oci"]
_NAME_BYTES = 200
"""The most bytes of a place's name in that of its hidden directory, which may have 255."""
_OWNER = "owner"
OWNER_STALE_S = 60.0
"""An export on another machine has been killed if it has not renewed its `owner` for so many seconds."""
OWNER_POLL_S = 0.5


class Exported:
    """A version that is exported: its manifest, and its files as a scan finds them now."""

    def __init__(self, models: Models, model: str, number: int, progress: Progress) -> None:
        """Errors: ModelNotFound, VersionDamaged, StoreError."""
        progress.begin("looking")
        self._read_manifest = partial(models.manifest, model, number)
        self.manifest: VersionManifest = models.manifest(model, number)
        self.tree: Tree = models.tree(model, number)
        self.progress = progress
        nodes = self.tree.scan()
        compare(self.tree.location, self.manifest.entries, nodes)
        found = {node.path: node for node in nodes}
        self.files: list[tuple[Node, Entry]] = [
            (found[entry.path], entry) for entry in self.manifest.entries if entry.kind == "file"
        ]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which files are read. Errors: ModelNotFound when the version is deleted meanwhile."""
        try:
            yield
        except (SourceChanged, NotFound):
            self._read_manifest()
            raise

    def begin(self) -> None:
        """Tell the progress that reading begins."""
        self.progress.begin("reading", self.manifest.files, self.manifest.size_bytes)

    def contents(self, transfer: Transfer, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Iterator[Body]]]:
        """Yield these files in order, each with its chunks, which the caller has to consume. Errors: VersionDamaged."""
        wanted = {entry.path for entry in entries}
        files = [each for each in self.files if each[1].path in wanted]
        with closing(transfer.stream(self.tree, [node for node, _ in files])) as stream:
            for index, pieces in groupby(stream, key=lambda found: found[0]):
                entry = files[index][1]
                yield entry, transfer.checked(self.tree, entry, (piece for _, piece in pieces))


@contextmanager
def appearing(models: Models, model: str, number: int, place: Path, form: Form, progress: Progress) -> Iterator[Path]:
    """Yield a path in a hidden directory, at which to make what becomes the place at the end of the block.

    Every export of the version to this place has the same hidden directory, one at a time, so that it continues or
    replaces what a killed one left. After an error it is kept only if another attempt may continue in it.
    Errors: AlreadyExists when something is at the place; AccessDenied; OutOfSpace and other StoreErrors.
    """
    hidden = _hidden(models, model, number, place, form)
    try:
        hidden.mkdir(0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        why = f"user {os.getuid()} may not write there; let it write in the directory above, or choose another one"
        raise AccessDenied(f"{error.filename}: {why}") from error
    made = hidden / "export"
    with storage_errors(place), _owned(hidden, progress) as is_ours:
        try:
            if not _is_free(place, hidden):
                raise AlreadyExists(f"{place}: is there already; give a directory that is not, or is empty")
            if form != "directory":
                DirectoryTree(made).remove()
            yield made
            if place.is_mount():  # it can't be replaced, so what was made moves into it
                for name in os.listdir(made):
                    os.rename(made / name, place / name)
            else:
                os.rename(made, place)
        except BaseException as error:
            if (form != "directory" or not can_resume(error)) and is_ours():
                with suppress(StoreError):  # report the first error
                    DirectoryTree(made).remove()  # before `owner` goes, for which another export may wait
                    DirectoryTree(hidden).remove()
            raise
        with suppress(StoreError):  # another export may be there by now
            DirectoryTree(hidden).remove()


@contextmanager
def _owned(hidden: Path, progress: Progress) -> Iterator[Callable[[], bool]]:
    """Wait until no other export, of any machine, has the hidden directory, and have it during the block. Yield a
    function that tells whether it is still ours. Its document `owner` is renewed, so that a killed export is known."""
    storage = DirectoryStorage(hidden)
    ours = json.dumps({**owner.identity(), "token": secrets.token_hex(8)}).encode()
    while True:
        progress.check()
        try:
            storage.create(_OWNER, ours)
            break
        except AlreadyExists:
            with suppress(NotFound, PreconditionFailed):  # it has just ended, or another one takes it over
                found = storage.read(_OWNER)
                if owner.is_dead(json.loads(found.body)) or storage.age_s(_OWNER) > OWNER_STALE_S:
                    storage.replace(_OWNER, ours, found.tag)
                    break
        except NotFound:
            continue  # it is being removed
        time.sleep(OWNER_POLL_S)

    def is_ours() -> bool:
        try:
            return storage.read(_OWNER).body == ours
        except StoreError:
            return False

    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(OWNER_STALE_S / 4):
            with suppress(OSError):
                os.utime(hidden / _OWNER)

    thread = threading.Thread(target=renew, name="export-owner", daemon=True)
    thread.start()
    try:
        yield is_ours
    finally:
        ended.set()
        thread.join()
        if is_ours():
            storage.remove(_OWNER)


def _hidden(models: Models, model: str, number: int, place: Path, form: Form) -> Path:
    name = os.fsencode(place.name)[:_NAME_BYTES].decode(errors="ignore")
    digest = models.head(model, number).digest.removeprefix("sha256:")
    return (place if place.is_mount() else place.parent) / f".{name}.{digest[:12]}.{form}.partial"


def _is_free(place: Path, hidden: Path) -> bool:
    """Return whether nothing is at a place, or an empty directory, in which `hidden` may be."""
    if not place.is_dir():
        return not place.exists()
    return all(each == hidden for each in place.iterdir())


def export_directory(models: Models, model: str, number: int, place: Path, progress: Progress) -> VersionManifest:
    """Export to a new or empty directory, which appears when it is whole. Errors: see appearing(); VersionDamaged."""
    with appearing(models, model, number, place, "directory", progress) as made:
        exported = Exported(models, model, number, progress)
        target = DirectoryTree(made)
        found = {node.path: node for node in target.scan()} if made.exists() else {}
        if not made.exists():
            target.begin()
        _into(exported, target, found)
        target.settle(exported.manifest.entries)
    return exported.manifest


def export_tree(models: Models, model: str, number: int, target: Tree, progress: Progress) -> VersionManifest:
    """Export into a tree that holds at most what an earlier attempt wrote.

    Errors: AlreadyExists, naming what else is there; VersionDamaged, after the files not there before are removed.
    """
    if isinstance(target, DirectoryTree) and _is_free(
        target.path, _hidden(models, model, number, target.path, "directory")
    ):
        return export_directory(models, model, number, target.path, progress)
    found: dict[str, Node] = {}
    with suppress(NotFound):
        found = {node.path: node for node in target.scan()}
    exported = Exported(models, model, number, progress)
    paths = {entry.path: entry.kind for entry in exported.manifest.entries}
    for path, node in found.items():
        if paths.get(path) != node.kind:
            raise AlreadyExists(f"{target.location}/{path}: is there already; choose a place where nothing is")
    try:
        _into(exported, target, found, foreign=True)
    except VersionDamaged:
        for node, _ in exported.files:
            if node.path not in found:
                target.discard(node.path)
        raise
    target.settle(exported.manifest.entries)
    return exported.manifest


def _into(exported: Exported, target: Tree, found: Mapping[str, Node], *, foreign: bool = False) -> None:
    """found: what is already there. foreign: it may be somebody else's."""
    entries = exported.manifest.entries
    filled = {entry.path.rpartition("/")[0] for entry in entries}
    nodes = {node.path: node for node, _ in exported.files}
    by_path = {entry.path: entry for entry in entries}
    largest = max(nodes.values(), key=lambda node: node.size, default=None)
    by_server = largest is not None and target.reaches(exported.tree, largest)
    exported.begin()
    with exported.reading(), Transfer(exported.progress) as transfer:

        def bring(node: Node) -> None:
            entry = by_path[node.path]
            old = found.get(node.path)
            if old is None or not _is_right(transfer, target, old, entry, foreign=foreign):
                _bring(exported.tree, transfer, node, entry, target, by_server=by_server)

        for entry in entries:
            if entry.kind == "directory":
                target.make(entry, bare=entry.path not in filled)
        transfer.each(list(nodes.values()), bring)
        for entry in entries:  # links are made last, so that nothing is ever written through a link
            if entry.kind == "symlink" and entry.path not in found:
                target.make(entry, bare=False)


def _is_right(transfer: Transfer, target: Tree, old: Node, entry: Entry, *, foreign: bool) -> bool:
    """Return whether a file is as it should be, else remove it. Errors: AlreadyExists if it is not and is foreign."""
    try:
        if old.size != entry.size:
            raise VersionDamaged(f"{target.location}/{old.path}: has another size")
        transfer.check(target, old, entry)
    except VersionDamaged as error:
        if foreign:
            raise AlreadyExists(
                f"{target.location}/{old.path}: is there with another content; choose an empty place"
            ) from error
        target.discard(old.path)
        return False
    return True


def _bring(
    source: ReadableTree, transfer: Transfer, node: Node, entry: Entry, target: Tree, *, by_server: bool
) -> None:
    if not by_server:
        transfer.check(source, node, entry, target)
        return
    transfer.check(source, node, entry)
    if target.copy(source, node, entry.path, entry.mode) is None:
        transfer.check(source, node, entry, target)


def export_tar_file(models: Models, model: str, number: int, place: Path, progress: Progress) -> VersionManifest:
    """Write a tar file, which appears when it is whole. Errors: see appearing(); VersionDamaged."""
    with appearing(models, model, number, place, "tar", progress) as made, made.open("xb", buffering=1 << 20) as out:
        manifest = export_tar(models, model, number, out, progress)
        out.flush()
        os.fsync(out.fileno())
    return manifest


def export_tar(models: Models, model: str, number: int, out: Out, progress: Progress) -> VersionManifest:
    """Write a tar archive (POSIX.1-2001), byte for byte the same each time. Errors: VersionDamaged, maybe midway."""
    exported = Exported(models, model, number, progress)
    exported.begin()
    manifest = exported.manifest
    about = f"{manifest.model}:{manifest.version} {manifest.digest}"
    out.write(tarfile.TarInfo.create_pax_global_header({"comment": about}))
    with Transfer(progress) as transfer:
        write_members(out, exported, transfer, manifest.entries, "")
    return manifest


class Out(Protocol):
    """The target of an archive."""

    def write(self, body: Body, /) -> object:
        """Write the whole body."""
        ...


def write_members(out: Out, exported: Exported, transfer: Transfer, entries: Sequence[Entry], prefix: str) -> None:
    """Write entries as members of an archive, and the end of the archive. prefix: '' or ends with '/'."""
    contents = exported.contents(transfer, entries)
    with exported.reading():
        for entry in entries:
            out.write(member(entry, prefix))
            if entry.kind == "file":
                _, chunks = next(contents)
                for chunk in chunks:
                    out.write(chunk)
                out.write(bytes(-entry.size % tarfile.BLOCKSIZE))
        for _ in contents:
            raise AssertionError("every file was written")
    out.write(bytes(2 * tarfile.BLOCKSIZE))


def member(entry: Entry, prefix: str) -> bytes:
    """Return an entry's header, without an owner and a time, so that equal versions make equal archives."""
    info = tarfile.TarInfo(prefix + entry.path)
    info.mode = entry.mode or (0o777 if entry.kind == "symlink" else 0)
    info.size = entry.size
    info.type = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}[entry.kind]
    info.linkname = entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
