"""A GlusterFS client's command line, and what is said of one that ends."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import GlusterFSLocation
from datastore.errors import Unreachable
from datastore.fuse.supervisor import glusterfs
from datastore.fuse.supervisor.glusterfs import CLIENT_LOG, GlusterSupervisor, command
from tests.promises import promise

SPEC = MountSpec(
    name="a",
    mountpoint="/mnt",
    source=GlusterFSLocation(servers=("g1", "10.0.0.2"), volume="v"),
    state_dir="/state",
    cache_dir="/cache",
    cache_size_bytes=1,
)


@promise("S-306")
@pytest.mark.parametrize(("path", "more"), [("/", []), ("/a/b/", ["--subdir-mount=/a/b"])])
def test_each_word_is_an_option_of_ours(path: str, more: list[str]) -> None:
    assert isinstance(SPEC.source, GlusterFSLocation)
    words = command(replace(SPEC, source=replace(SPEC.source, path=path)), Path("/state/client"))
    assert words[:5] == [
        "glusterfs",
        "--no-daemon",
        "--process-name=fuse",
        "--volfile-server=g1",
        "--volfile-server=10.0.0.2",
    ]
    assert [word for word in words if word.startswith("--subdir")] == more
    assert words[-1] == "/state/client"
    assert "--read-only" not in words
    assert "--read-only" in command(replace(SPEC, read_only=True), Path("/x"))
    assert all(word.startswith("--") for word in words[1:-1])


@promise("S-306")
def test_a_client_that_ends_at_once_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its supervisor looks at it for the first time; what clients before it said does not count."""
    program = tmp_path / "glusterfs"
    program.write_text(f"#!/bin/sh\necho failed to connect with remote-host >>{tmp_path / CLIENT_LOG}\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / CLIENT_LOG).write_text("failed to fetch volume file\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def ended(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(*arguments, **options)
        process.wait()
        return process

    monkeypatch.setattr(glusterfs, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ended}))
    supervisor = GlusterSupervisor(replace(SPEC, state_dir=str(tmp_path)))
    with pytest.raises(Unreachable, match=r"none of the servers g1, 10\.0\.0\.2 answers"):
        supervisor._begin()
