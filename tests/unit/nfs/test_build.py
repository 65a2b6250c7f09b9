"""What the builder refuses before it asks anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation, S3Location
from datastore.errors import InvalidManifest, MountFailed
from datastore.fuse.nfs import libnfs
from datastore.fuse.nfs.build import build_mount
from tests.promises import promise


def spec(base: Path, source: NFSLocation | S3Location) -> MountSpec:
    return MountSpec(
        name="n", mountpoint=str(base / "m"), source=source, state_dir=str(base / "s"), cache_dir=str(base / "c")
    )


@promise("S-270")
def test_other_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest, match=r"version 3, and 4\.1 is asked for"):
        build_mount(spec(tmp_path, NFSLocation(server="h", path="/p", version="4.1")))
    with pytest.raises(InvalidManifest, match="is no NFS export"):
        build_mount(spec(tmp_path, S3Location(bucket="b")))


@promise("S-270")
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnfs, "LIBRARIES", ("libnfs.so.999",))
    libnfs.library.cache_clear()
    with pytest.raises(MountFailed, match="apt-get install libnfs13"):
        build_mount(spec(tmp_path, NFSLocation(server="h", path="/p")))
    libnfs.library.cache_clear()
