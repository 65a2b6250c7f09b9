"""Mounts made the way a person makes them: a manifest and the `datastore` command, with a cache of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from datastore import beneath, mountinfo
from tests.servers import Server

COMMAND_TIMEOUT_S = 240.0
COMMAND = str(Path(sys.executable).with_name("datastore"))
NAME = "work"


@dataclass(frozen=True, slots=True)
class Client:
    """One machine: a folder with everything it keeps. The path should be short (Unix sockets)."""

    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """The caller's, with the places of this machine."""
        places = {f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
        return {**os.environ, **places, "XDG_RUNTIME_DIR": str(self.folder / "run")}

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """`datastore ARGUMENTS`, bounded. Errors: RuntimeError with what it said."""
        # Files, not pipes: the mount server may keep the descriptors it was given.
        log = self.folder / "command.log"
        with log.open("w") as output:
            done = subprocess.run(
                [COMMAND, *map(str, arguments)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        text = log.read_text()
        if done.returncode != 0:
            raise RuntimeError(f"datastore {arguments[0]} ended with {done.returncode}: {text}")
        return subprocess.CompletedProcess(done.args, done.returncode, text, "")


def manifest(server: Server, bucket: str, **spec: Any) -> str:
    """One Datastore over a bucket of the server, with its Secret. spec: more fields of `spec`."""
    datastore = {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "Datastore",
        "metadata": {"name": NAME},
        "spec": {
            "s3": {
                "bucket": bucket,
                "endpoint": server.endpoint,
                "region": server.region,
                "credentialsSecret": "keys",
                "create": True,
                **({"caBundle": server.ca_bundle} if server.ca_file else {}),
            },
            **spec,
        },
    }
    keys = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "stringData": {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key},
    }
    return yaml.safe_dump_all([datastore, keys])


@contextlib.contextmanager
def mounted(server: Server, bucket: str, folder: Path, *options: str, **spec: Any) -> Iterator[Path]:
    """A fresh mount in `folder` (made if needed), unmounted at the end. Errors: RuntimeError when either fails."""
    client = Client(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    target = folder / "mnt"
    target.mkdir(exist_ok=True)
    file = folder / "datastore.yaml"
    file.write_text(manifest(server, bucket, **spec))
    client.run("mount", *options, file, NAME, target)
    try:
        yield target
    finally:
        try:
            client.run("umount", target)
        finally:
            unmount_all(folder)


def unmount_all(folder: Path) -> None:
    """End the mounts below a folder that a failed test left, so that the folder can be removed."""
    for mount in reversed(mountinfo.read().mounts):
        target = Path(mount.mountpoint)
        if target.is_relative_to(folder):
            subprocess.run(["umount", "--lazy", str(target)], check=False)
            give_back(folder, target)


def give_back(folder: Path, target: Path) -> None:
    """Make the directory beneath a mount that nobody ended in order removable again (S-60)."""
    for note in folder.glob(f"state/kube-datastore/mounts/*/{beneath.NOTE_FILE}"):
        beneath.restore(str(target), note)
