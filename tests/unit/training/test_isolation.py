"""datastore.training.local.isolation: podman and docker (S-335). The podman is made up."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from datastore.errors import DatastoreError
from datastore.training.local.isolation import Container, Run
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


@promise("S-335")
@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (["train", "-v"], [], ["--entrypoint", "train", "digits:1", "-v"]),
        ([], ["-v"], ["digits:1", "-v"]),
        ([], [], ["digits:1"]),
    ],
)
def test_the_command_or_the_arguments_of_the_job_replace_those_of_the_image(
    container: Container, command: list[str], arguments: list[str], words: list[str]
) -> None:
    run = Run(unique="a", job="a", command=command, arguments=arguments, variables={}, image="digits:1")
    shown = ["--volume", f"{container.shown['/data'].source}:/data"]
    line = container.command_line(run)
    assert line[line.index("missing") + 1 :] == [*shown, *words]


@promise("S-335")
def test_variables_of_the_job_are_none_of_the_engine(container: Container) -> None:
    """It is found, and finds its images, whatever the job's PATH and HOME; no other value shows in an argument."""
    variables = {"HOME": "/workspace", "PATH": "/opt/conda/bin", "TOKEN": "secret"}
    run = Run(unique="digits-0", job="digits", command=["train"], variables=variables, image="digits:1")
    command, environment = container.command_line(run), container.environment(run)
    given = [word for option, word in itertools.pairwise(command) if option == "--env"]
    assert given == ["HOME=/workspace", "PATH=/opt/conda/bin", "TOKEN"]
    assert environment == {**os.environ, "TOKEN": "secret"}
