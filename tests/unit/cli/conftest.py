"""The command in this process, over a fake mount server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from datastore import controlclient
from datastore.cli import app
from datastore.mounting import launch, mountserver, places
from tests.patience import PATIENCE_S

FAKE = Path(__file__).with_name("fake_server.py")
CANARY = "CANARYsecretCANARYsecret"

MANIFEST = f"""
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: digits}}
spec:
  readOnly: true
  s3: {{bucket: digits, endpoint: "http://127.0.0.1:9", credentialsSecret: keys}}
---
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: output}}
spec:
  s3: {{bucket: output, endpoint: "http://127.0.0.1:9", credentialsSecret: keys}}
---
apiVersion: v1
kind: Secret
metadata: {{name: keys}}
stringData: {{AWS_ACCESS_KEY_ID: id, AWS_SECRET_ACCESS_KEY: {CANARY}}}
"""


class Result(NamedTuple):
    """What a verb did."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a verb; no output ever holds the secret key."""

    def run(*arguments: str | Path) -> Result:
        capfd.readouterr()
        code = app.exit_code_of(lambda: app.run([str(each) for each in arguments]))
        result = Result(code, *capfd.readouterr())
        assert CANARY not in result.out + result.err
        return result

    return run


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own state root; the fake servers that a test left are ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The name of the module must be in the command line, or the command takes it for a stranger's process.
    monkeypatch.setattr(launch, "command", lambda: [sys.executable, str(FAKE), "datastore.fuse"])
    # The fake answers at once, but has to be started first.
    monkeypatch.setattr(mountserver, "READY_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(mountserver, "STOP_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(controlclient, "CONNECT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(controlclient, "STATUS_TIMEOUT_S", PATIENCE_S)
    yield places.state_root()
    for file in places.state_root().glob("*/fake.pid"):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(int(file.read_text()), signal.SIGKILL)
            os.waitpid(int(file.read_text()), 0)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "datastores.yaml"
    path.write_text(MANIFEST)
    return path


MountOutput = Callable[..., Path]


@pytest.fixture
def mount_output(cli: Cli, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MountOutput:
    """Mount `output` over a fake server that behaves so, and says this of its storage. Return where."""

    def mount(mode: str, storage: dict[str, object] | None = None) -> Path:
        monkeypatch.setenv("FAKE_MODE", mode)
        monkeypatch.setenv("FAKE_STORAGE", json.dumps(storage))
        assert cli("mount", manifest, "output", tmp_path / "d").code == 0
        return tmp_path / "d"

    return mount


def state_of(root: Path, name: str) -> Path:
    """The state directory of a Datastore that was mounted once."""
    (found,) = root.glob(f"{name}-*")
    return found


def mounted_by_the_kernel(root: Path, name: str, place: Path, kind: str) -> None:
    """What a command leaves that had the kernel mount a Datastore: no process of ours serves that."""
    state_dir = root / f"{name}-kernel"
    state_dir.mkdir(parents=True)
    seen = {"name": name, "mountpoint": str(place), "location": f"{kind}:/{name}", "kind": kind}
    (state_dir / "mount.json").write_text(json.dumps({"spec": seen}))


def asked(root: Path, name: str) -> list[dict[str, object]]:
    """What a fake server was asked."""
    return [json.loads(line) for line in (state_of(root, name) / "asked").read_text().splitlines()]


def leave_unsent(state_dir: Path, *keys: str, stuck: bool = False) -> None:
    """What a mount server that died leaves of files it could not upload. stuck: sending them again is no use."""
    (state_dir / "staging").mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(state_dir / "state.db")) as database:
        database.execute("create table unsent(staging text, key text, since_ns integer, error text, stuck integer)")
        for number, key in enumerate(keys):
            (state_dir / "staging" / str(number)).write_bytes(b"x" * 1024)
            row = (str(number), key, 1_700_000_000_000_000_000, "403 AccessDenied" if number else "", stuck)
            database.execute("insert into unsent values(?, ?, ?, ?, ?)", row)
        database.commit()
