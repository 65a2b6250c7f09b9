"""datastore serve: what is refused before anything runs. The mount itself: tests/e2e/test_serve.py."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from datastore.api.datastore import Datastore
from datastore.cli.serve import default_server
from datastore.errors import DatastoreError
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.saving import Wish, save
from datastore.mounting import lifecycle
from datastore.mounting.records import MountRecord
from tests.modelstores import flip, plant
from tests.promises import promise
from tests.servers import free_port

from .conftest import Cli

MANIFEST = """
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: models}}
spec: {{local: {{path: {root}/models}}}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory whose p.yaml has digits:1 in its store; PATH has no programs."""
    (tmp_path / "p.yaml").write_text(MANIFEST.format(root=tmp_path))
    (tmp_path / "models").mkdir()
    source = DirectoryTree(plant(tmp_path / "run"))
    save(Models(DirectoryStorage(tmp_path / "models")), source, Wish(model="digits"), Progress())
    monkeypatch.setenv("DATASTORE_FILE", str(tmp_path / "p.yaml"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(here: Path, name: str) -> str:
    at = here / "bin" / name
    at.touch()
    at.chmod(at.stat().st_mode | stat.S_IXUSR)
    return str(at)


@promise("S-411")
def test_a_damaged_version_is_not_served(here: Path, cli: Cli) -> None:
    at = next(each for each in sorted((here / "models" / "digits" / "1").rglob("*")) if each.is_file())
    flip(at, 0)
    code, _, err = cli("serve", "digits", "--", "/bin/touch", str(here / "served"))
    assert code == 1
    assert "digits:1 is not served" in err
    assert "was saved with sha256" in err
    assert not (here / "served").exists()


def test_a_port_in_use_is_reported_before_anything_is_mounted(here: Path, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli("serve", "digits", "--port", str(port), "--", "/bin/touch", str(here / "served"))
    line = f"error: another program on this machine listens on port {port}; name another port with --port\n"
    assert done == (1, "", line)
    assert not (here / "served").exists()


def test_a_server_that_cannot_start_is_not_reported_as_serving(
    here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(_manifest: object, datastore: Datastore, place: str, *_: object, **__: object) -> MountRecord:
        return MountRecord(
            state_dir=here, name=datastore.metadata.name, mountpoint=place, location="", in_kernel="bind"
        )

    monkeypatch.setattr(lifecycle, "mount", mount)
    missing = cli("serve", "digits", "--port", str(free_port()), "--", "nosuch")
    assert (missing.code, "nosuch: no such command" in missing.err, "port" in missing.err) == (127, True, False)
    port = free_port()
    served = cli("serve", "digits", "--port", str(port), "--", "/bin/true")
    assert served.code == 0
    assert f"has started, for port {port}; Ctrl-C ends it\n" in served.err


def test_a_podman_that_does_not_see_the_version_is_not_started(
    here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is not root, and / is no shared mount on this machine."""

    def mount(_manifest: object, datastore: Datastore, place: str, *_: object, **__: object) -> MountRecord:
        Path(place).mkdir(parents=True)
        return MountRecord(
            state_dir=here, name=datastore.metadata.name, mountpoint=place, location="", in_kernel="bind"
        )

    monkeypatch.setattr(lifecycle, "mount", mount)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    Path(program(here, "podman")).write_text(f"#!/bin/sh\n[ $1 = unshare ] && echo 1 || : > {here}/served\n")
    code, _, err = cli("serve", "digits", "--port", str(free_port()))
    assert (code, "podman does not see what is mounted for /models/model/1" in err) == (1, True), err
    assert not (here / "served").exists()


@promise("S-415")
def test_without_anything_that_serves_it_says_what_to_do(here: Path, cli: Cli) -> None:
    code, _, err = cli("serve", "digits")
    assert code == 1
    assert "neither tensorflow_model_server nor podman nor docker" in err
    assert "-- python server.py" in err


@promise("S-415")
def test_the_server_is_tensorflow_serving_where_there_is_one_and_else_its_image(here: Path) -> None:
    place, image = here / "digits" / "7", "docker.io/tensorflow/serving:2.19.1"
    with pytest.raises(DatastoreError):
        default_server(place, 9000, "grpc", image)
    podman = program(here, "podman")
    by_podman = default_server(place, 9000, "http", image).command
    assert by_podman[:2] == [podman, "run"]
    assert by_podman[-1] == image
    assert {"--publish=9000:8501", f"--volume={place}:/models/model/1:ro"} <= set(by_podman)
    server = program(here, "tensorflow_model_server")
    assert default_server(place, 9000, "grpc", image).command == [
        *(server, "--port=9000", "--rest_api_port=0", "--model_name=model", f"--model_base_path={here / 'digits'}")
    ]
