"""What the builder refuses before it asks anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location, SFTPLocation, Source, SSHCredentials
from datastore.errors import InvalidManifest
from datastore.fuse.sftp.build import build_mount
from datastore.secret import Secret
from tests.promises import promise


def spec(base: Path, source: Source) -> MountSpec:
    return MountSpec(
        name="n", mountpoint=str(base / "m"), source=source, state_dir=str(base / "s"), cache_dir=str(base / "c")
    )


@promise("S-278")
def test_other_sources_and_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    """The error does not show the key."""
    with pytest.raises(InvalidManifest, match="is no directory of an SSH server"):
        build_mount(spec(tmp_path, S3Location(bucket="b")))
    key = SSHCredentials(username="u", private_key=Secret("-----BEGIN nothing-----\nsecret\n"))
    with pytest.raises(InvalidManifest, match="ssh-privatekey is no private key that can be used") as refused:
        build_mount(spec(tmp_path, SFTPLocation(host="h", path="/p", credentials=key)))
    assert "secret" not in str(refused.value).replace("Secret", "")
