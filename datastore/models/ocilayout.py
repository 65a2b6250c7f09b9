"""Export a version as an OCI image layout for image volumes and KServe's modelcars; any tool for layouts can push it.

Sources: OCI image format specification 1.1 (image layout, image index, manifest, configuration, layers). The files are
below models/ in the image, where KServe looks for them. Layers are plain tar archives, because weights don't
compress; so the digests depend on the version alone. Equal versions make equal layouts. Without a base the image holds
data only, and is listed for amd64 and arm64 with the same layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from datastore.models.errors import ModelError
from datastore.models.exporting import Exported, appearing, member, write_members
from datastore.models.manifest import Entry, VersionManifest
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.transfer import Transfer

PREFIX = "models/"
LAYER_BYTES = 4 << 30
"""The most bytes of a layer with several files: registries and pulls take several at once, and refuse huge layers."""
ARCHITECTURES = ("amd64", "arm64")
DIGEST_LABEL = "dev.datastore.model.digest"
VERSION_LABEL = "dev.datastore.model.version"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
_EPOCH = "1970-01-01T00:00:00Z"
_REF_NAME = "org.opencontainers.image.ref.name"
_DOCUMENT_MAX = 16 << 20

Descriptor = Mapping[str, Any]


class Layout:
    """A directory that is an OCI image layout. Errors: ModelError when the directory is not a valid one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self) -> None:
        """Make the directory, without an index and blobs."""
        (self.root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (self.root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def images(self) -> list[Descriptor]:
        """Return the descriptors of the images that the index lists, also those in indexes below the index."""
        try:
            index = json.loads((self.root / "index.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.root}: is no OCI image layout: it has no index.json ({error})") from None
        return list(self._images(index, 4))

    def document(self, descriptor: Descriptor) -> dict[str, Any]:
        """Read a JSON blob and check its digest."""
        path = self.blob(str(descriptor["digest"]))
        body = path.read_bytes() if path.stat().st_size <= _DOCUMENT_MAX else b""
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != descriptor["digest"]:
            raise ModelError(f"{path}: does not have the digest that it is named by")
        found: dict[str, Any] = json.loads(body)
        return found

    def blob(self, digest: str) -> Path:
        """Return the path of a blob."""
        kind, _, value = digest.partition(":")
        if kind != "sha256" or len(value) != 64 or not all(each in "0123456789abcdef" for each in value):
            raise ModelError(f"{self.root}: has a blob of digest {digest[:80]!r}, and only sha256 is read")
        path = self.root / "blobs" / kind / value
        if not path.is_file():
            raise ModelError(f"{self.root}: lacks the blob {digest}")
        return path

    def add_document(self, media_type: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Write a JSON blob and return its descriptor."""
        body = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
        digest = hashlib.sha256(body).hexdigest()
        (self.root / "blobs" / "sha256" / digest).write_bytes(body)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(body)}

    def add_blob_of(self, other: Layout, descriptor: Descriptor) -> None:
        """Copy a blob from another layout."""
        shutil.copyfile(other.blob(str(descriptor["digest"])), self.root / "blobs/sha256" / descriptor["digest"][7:])

    def write_index(self, manifests: Sequence[Descriptor]) -> None:
        """Write the index, as the last step: only the index makes the directory a layout."""
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests)}
        (self.root / "index.json").write_text(json.dumps(index, separators=(",", ":"), sort_keys=True))

    def _images(self, index: Mapping[str, Any], depth: int) -> Iterator[Descriptor]:
        for each in index.get("manifests", []):
            if each.get("mediaType") == INDEX and depth:
                yield from self._images(self.document(each), depth - 1)
            elif each.get("mediaType") == MANIFEST:
                yield each


def export_layout(
    models: Models,
    model: str,
    number: int,
    place: Path,
    progress: Progress,
    *,
    base: Path | None = None,
    layer_bytes: int = LAYER_BYTES,
) -> VersionManifest:
    """Write a new layout at a place. base: the layout of an image to add the layers to, such as one with a shell.

    Errors: see appearing(); ModelError for the base; VersionDamaged.
    """
    beneath = (
        _bases(Layout(base)) if base else [(None, {"architecture": each, "os": "linux"}) for each in ARCHITECTURES]
    )
    with appearing(models, model, number, place, "oci", progress) as made:
        exported = Exported(models, model, number, progress)
        layout = Layout(made)
        layout.begin()
        exported.begin()
        with Transfer(progress) as transfer:
            layers = [
                _add_layer(layout, exported, transfer, entries)
                for entries in cut(exported.manifest.entries, layer_bytes)
            ]
        images = [_add_image(layout, exported.manifest, layers, over, config, base) for over, config in beneath]
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": images, "annotations": _said(exported.manifest)}
        named = {_REF_NAME: str(number), **_said(exported.manifest)}
        layout.write_index([{**layout.add_document(INDEX, index), "annotations": named}])
    return exported.manifest


def cut(entries: Sequence[Entry], layer_bytes: int) -> Iterator[list[Entry]]:
    """Yield each layer's entries, with the directories above the first, so that a layer does not change their modes."""
    directories = {entry.path: entry for entry in entries if entry.kind == "directory"}
    layer: list[Entry] = []
    size = 0
    for entry in entries:
        if size and size + entry.size > layer_bytes:
            yield layer
            layer, size = [], 0
        if not layer:
            above = entry.path.split("/")[:-1]
            layer = [directories["/".join(above[:depth])] for depth in range(1, len(above) + 1)]
        layer.append(entry)
        size += entry.size
    yield layer


def _add_layer(layout: Layout, exported: Exported, transfer: Transfer, entries: Sequence[Entry]) -> dict[str, Any]:
    temporary = layout.root / "layer"
    with temporary.open("xb", buffering=1 << 20) as file:
        digesting = _Digesting(file)
        digesting.write(member(Entry(PREFIX.removesuffix("/"), "directory", 0o755), ""))
        write_members(digesting, exported, transfer, entries, PREFIX)
    digest = digesting.sha256.hexdigest()
    os.rename(temporary, layout.root / "blobs" / "sha256" / digest)
    return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": digesting.size}


def _add_image(
    layout: Layout,
    manifest: VersionManifest,
    layers: Sequence[Descriptor],
    over: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    base: Path | None,
) -> dict[str, Any]:
    """Add an image and return its descriptor. over: the manifest of the base image; config: its configuration."""
    beneath = list(over["layers"]) if over else []
    if base is not None:
        for each in beneath:
            layout.add_blob_of(Layout(base), each)
    said = f"{manifest.model}:{manifest.version} {manifest.digest}"
    made = {
        **config,
        "created": _EPOCH,
        "rootfs": {
            "type": "layers",
            "diff_ids": [*config.get("rootfs", {}).get("diff_ids", []), *(each["digest"] for each in layers)],
        },
        "history": [
            *config.get("history", []),
            *({"created": _EPOCH, "created_by": "datastore model export", "comment": said} for _ in layers),
        ],
    }
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": layout.add_document(CONFIG, made),
        "layers": [*beneath, *layers],
        "annotations": _said(manifest),
    }
    platform = {name: config[name] for name in ("architecture", "os", "variant") if name in config}
    return {**layout.add_document(MANIFEST, document), "platform": platform}


def _bases(layout: Layout) -> list[tuple[dict[str, Any] | None, dict[str, Any]]]:
    """Return the manifest and the configuration of each image of a base."""
    found: list[tuple[dict[str, Any] | None, dict[str, Any]]] = []
    for each in layout.images():
        manifest = layout.document(each)
        found.append((manifest, layout.document(manifest["config"])))
    if not found:
        raise ModelError(f"{layout.root}: has no image that one can be put on")
    return found


def _said(manifest: VersionManifest) -> dict[str, str]:
    return {DIGEST_LABEL: manifest.digest, VERSION_LABEL: f"{manifest.model}:{manifest.version}"}


class _Digesting:
    """A file that computes the digest and the size of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0
        self._file = file

    def write(self, body: bytes | bytearray | memoryview) -> int:
        """See BinaryIO."""
        self.sha256.update(body)
        self.size += len(body)
        return self._file.write(body)
