"""The command line of a GlusterFS client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import GlusterFSLocation
from datastore.fuse.supervisor.glusterfs import command
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
