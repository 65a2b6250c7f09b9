"""A tar file, or the layers of an OCI image, as one tree whose files are read from within the archives.

Names that lead out of the tree, devices, and names that a tar file has twice are refused before anything is saved; a
save refuses links that lead out. A compressed archive is first unpacked into a temporary file without a name.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from datastore.models.errors import SourceChanged, SourceInvalid
from datastore.models.manifest import check_path
from datastore.models.ocilayout import DIGEST_LABEL, LAYER, PREFIX, VERSION_LABEL, Layout
from datastore.models.storage import Node, Piece

_GZIP = b"\x1f\x8b"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_LAYERS = {LAYER, f"{LAYER}+gzip"}


class Said(NamedTuple):
    """The version and digest that an archive says it holds; '' where it says nothing."""

    version: str = ""
    digest: str = ""


class Archive(NamedTuple):
    """An open archive that is not compressed. state: as Node.state, of the file that the archive was opened from."""

    file: IO[bytes]
    state: str


class ArchiveTree:
    """See ReadableTree. A context manager, whose end closes the archives."""

    def __init__(self, location: str, archives: Sequence[Archive], *, prefix: str = "", layers: bool = False) -> None:
        """prefix: '' or ends with '/'; only what is below is shown. layers: archives may hide files of earlier ones."""
        self._location = location
        self._archives = archives
        self._prefix = prefix
        self._layers = layers
        self.said = Said()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._archives:
            each.file.close()

    @property
    def location(self) -> str:
        """The path of the file or layout."""
        return self._location

    def scan(self) -> list[Node]:
        """See ReadableTree."""
        nodes: dict[str, Node] = {}
        for number, (file, _) in enumerate(self._archives):
            file.seek(0)
            try:
                with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
                    self._read_comment(archive)
                    for info in archive:
                        self._take(nodes, number, archive, info)
            except tarfile.TarError as error:
                raise SourceInvalid(f"{self._location}: is no tar archive, or a damaged one: {error}") from None
        for path in sorted(nodes):
            above = path.split("/")[:-1]
            for depth in range(1, len(above) + 1):
                nodes.setdefault("/".join(above[:depth]), Node("/".join(above[:depth]), "directory", mode=0o755))
        return sorted(nodes.values(), key=lambda node: node.path)

    def read(self, node: Node, start: int, stop: int) -> Piece:
        """See ReadableTree."""
        number, _, offset = node.at.partition(":")
        file = self._archives[int(number)].file
        body = os.pread(file.fileno(), stop - start, int(offset) + start)
        if len(body) != stop - start:
            raise SourceChanged(f"{self._location}: became shorter while it was read")
        return Piece(body, stat.S_IFREG | (node.mode or 0))

    def _take(self, nodes: dict[str, Node], number: int, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        path = self._path(info.name)
        if path is None:
            return
        name = path.rpartition("/")[2]
        if self._layers and name.startswith(_WHITEOUT):
            above = path[: len(path) - len(name)]
            hidden = above if name == _OPAQUE else above + name.removeprefix(_WHITEOUT)
            for each in [each for each in nodes if each == hidden or each.startswith(hidden.rstrip("/") + "/")]:
                del nodes[each]
            return
        node = self._node(path, nodes, number, archive, info)
        old = nodes.get(path)
        if old is not None and not self._layers and not (old.kind == node.kind == "directory"):
            raise SourceInvalid(f"{self._location}: has {path} twice")
        nodes[path] = node

    def _node(
        self, path: str, nodes: dict[str, Node], number: int, archive: tarfile.TarFile, info: tarfile.TarInfo
    ) -> Node:
        mode = stat.S_IMODE(info.mode)
        if info.isdir():
            return Node(path, "directory", mode=mode)
        if info.issym():
            return Node(path, "symlink", target=info.linkname)
        if info.islnk():
            try:
                linked = nodes.get(self._path(info.linkname) or "")
            except SourceInvalid:
                linked = None
            if linked is None or linked.kind != "file":
                raise SourceInvalid(f"{self._location}: {path} is a hard link to {info.linkname}, which is not there")
            return linked._replace(path=path)
        if not info.isreg() or info.sparse is not None:
            raise SourceInvalid(f"{self._location}: {path} is a device, FIFO or sparse file, which no version can hold")
        state = f"{self._archives[number].state}:{info.offset_data}"
        return Node(path, "file", info.size, mode, at=f"{number}:{info.offset_data}", state=state)

    def _path(self, name: str) -> str | None:
        """Return the path below the prefix; None for the root and names not below it. Errors: SourceInvalid."""
        plain = name
        while plain.startswith("./"):
            plain = plain.removeprefix("./")
        plain = plain.rstrip("/")
        if plain in ("", "."):
            return None
        try:
            check_path(plain)
        except ValueError as error:
            raise SourceInvalid(f"{self._location}: {error}") from None
        return plain.removeprefix(self._prefix) if plain.startswith(self._prefix) else None

    def _read_comment(self, archive: tarfile.TarFile) -> None:
        """Read what our own exports say about themselves (exporting.export_tar)."""
        version, _, digest = archive.pax_headers.get("comment", "").partition(" ")
        if digest.startswith("sha256:"):
            self.said = Said(version, digest)


@contextmanager
def open_tar(path: Path) -> Iterator[ArchiveTree]:
    """Open a tar file, gzipped or not. Errors: SourceInvalid."""
    with ArchiveTree(str(path), [_plain(path)]) as tree:
        yield tree


@contextmanager
def open_layout(root: Path) -> Iterator[ArchiveTree]:
    """Open what an image holds below models/. Errors: ModelError, SourceInvalid."""
    layout = Layout(root)
    images = layout.images()
    if not images:
        raise SourceInvalid(f"{root}: holds no image")
    documents = [layout.document(each) for each in images]
    manifest = documents[0]
    if any(each["layers"] != manifest["layers"] for each in documents):
        raise SourceInvalid(
            f"{root}: holds several images with different layers; make a layout of the one that you mean"
        )
    said = manifest.get("annotations", {})
    known = Said(str(said.get(VERSION_LABEL, "")), str(said.get(DIGEST_LABEL, "")))
    archives: list[Archive] = []
    try:
        for layer in manifest["layers"]:
            if layer["mediaType"] not in _LAYERS:
                raise SourceInvalid(f"{root}: has a layer of type {layer['mediaType']}, which this release can't read")
            path = layout.blob(str(layer["digest"]))
            if not known.digest:
                _check_blob(path, str(layer["digest"]))
            archives.append(_plain(path))
        tree = ArchiveTree(str(root), archives, prefix=PREFIX, layers=True)
    except BaseException:
        for each in archives:
            each.file.close()
        raise
    tree.said = known
    with tree:
        yield tree


def _plain(path: Path) -> Archive:
    """Open the file, or a temporary file with its unpacked content if it is gzipped. Errors: SourceInvalid."""
    try:
        file = path.open("rb")
        found = os.fstat(file.fileno())
        state = f"{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
        if file.read(2) != _GZIP:
            return Archive(file, state)
        file.seek(0)
        unpacked = tempfile.TemporaryFile()  # noqa: SIM115  (the tree closes it)
        try:
            with file, gzip.open(file) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            unpacked.flush()
        except BaseException:
            unpacked.close()
            raise
        return Archive(unpacked, state)
    except (OSError, EOFError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SourceInvalid(f"{path}: can't be read: {why}") from None


def check_blobs(root: Path) -> None:
    """Check that each blob of a layout has the digest that it is named by. Errors: SourceInvalid."""
    folder = root / "blobs" / "sha256"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        _check_blob(path, f"sha256:{path.name}")


def _check_blob(path: Path, digest: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if f"sha256:{found}" != digest:
        raise SourceInvalid(f"{path}: has the digest sha256:{found}, not the one that it is named by")
