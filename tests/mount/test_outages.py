"""The store that tests take away: it must come back when they say so, whatever the mount is doing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import mounted
from tests.mount.outages import breakable
from tests.servers import Server

pytestmark = pytest.mark.fuse


def test_a_store_starts_while_a_changed_file_is_open(
    versitygw: Server, clean_environment: Path, tmp_path: Path
) -> None:
    """Its start must not wait for itself: a child of ours would send the file when it closes its copy of it."""
    with breakable(str(tmp_path)) as storage:
        server = storage.server
        with mounted(server, new_bucket(server), clean_environment) as mount:
            with (mount.path / "file").open("wb", buffering=0) as file:
                file.write(b"content")
                storage.stop()
                began = time.monotonic()
                storage.run()
                took_s = time.monotonic() - began
            assert took_s < 45, "less than a send is tried for"
            assert mount.objects.get("file") == b"content"
