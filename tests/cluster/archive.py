"""The image of a pod's sandbox as an OCI archive: one layer with one program, so nothing is needed to build it."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

from tests.cluster.components import PAUSE_IMAGE
from tests.servers import tools_dir

MEDIA = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def pause_archive(folder: Path) -> Path:
    """Write pause.tar into the folder; the node loads it as PAUSE_IMAGE."""
    layer = _tar({"pause": (tools_dir() / "pause").read_bytes()}, mode=0o755)
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
    }
    blobs = [layer, json.dumps(config).encode()]
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "config": _descriptor(blobs[1], "config.v1+json"),
        "layers": [_descriptor(layer, "layer.v1.tar")],
    }
    blobs.append(json.dumps(manifest).encode())
    named = {**_descriptor(blobs[2], "manifest.v1+json"), "annotations": {"io.containerd.image.name": PAUSE_IMAGE}}
    files = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in blobs}
    files["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    path = folder / "pause.tar"
    path.write_bytes(_tar(files, mode=0o644))
    return path


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _descriptor(blob: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": f"{MEDIA}.{kind}", "digest": _digest(blob), "size": len(blob)}


def _tar(files: dict[str, bytes], *, mode: int) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()
