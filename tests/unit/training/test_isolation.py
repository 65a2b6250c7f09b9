"""datastore.training.local.isolation: what podman without root sees (S-335). The podman is made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datastore.errors import DatastoreError
from datastore.training.local.isolation import Container
from datastore.training.local.sandbox import Shown
from tests.promises import promise


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    """Of a user who is not root; `podman unshare COMMAND` runs the file `seen`."""
    program = tmp_path / "podman"
    program.write_text('#!/bin/sh\n[ "$1" = unshare ] && shift && . "$(dirname "$0")/seen"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    return Container(engine="podman", shown={"/data": Shown(source=str(tmp_path))}, working_dir=None)


@promise("S-335")
def test_a_podman_that_sees_the_mounts_is_taken(container: Container, tmp_path: Path) -> None:
    (tmp_path / "seen").write_text('"$@"\n')
    container.check()


@promise("S-335")
@pytest.mark.parametrize("seen", ["echo 1\n", "exit 1\n"])
def test_a_podman_that_does_not_see_the_mounts_is_refused(container: Container, tmp_path: Path, seen: str) -> None:
    """It has a mount namespace from before them, and no mount comes in later."""
    (tmp_path / "seen").write_text(seen)
    with pytest.raises(
        DatastoreError, match=r"podman does not see what is mounted for /data: .* mount --make-rshared /"
    ):
        container.check()
