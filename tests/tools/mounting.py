"""Mounts made as a user makes them: by a manifest and the `datastore` command, with a cache of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
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
    """One client machine, as a folder with all its state. The path should be short, as it has Unix sockets."""

    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """The caller's environment, with the directories of this machine."""
        places = {f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
        return {**os.environ, **places, "XDG_RUNTIME_DIR": str(self.folder / "run")}

    def command(self, *arguments: str | Path, apart: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `datastore ARGUMENTS` for a bounded time; it may fail. apart: keep standard error apart."""
        # Files, not pipes: the mount server may keep the descriptors that it inherits, and a pipe would stay open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                [COMMAND, *map(str, arguments)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if apart else out,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
            for each in (out, err):
                each.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command that has to succeed. Errors: RuntimeError with the output."""
        done = self.command(*arguments, apart=False)
        if done.returncode != 0:
            raise RuntimeError(f"datastore {arguments[0]} ended with {done.returncode}: {done.stdout}")
        return done


def manifest(server: Server, bucket: str, name: str = NAME, **spec: Any) -> str:
    """Return the YAML of a Datastore over a bucket of the server, with its Secret. spec: more fields of `spec`."""
    datastore = {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "Datastore",
        "metadata": {"name": name},
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
    for target in reversed(mounted_below(folder)):
        subprocess.run(["umount", "--lazy", str(target)], check=False)
        give_back(folder, target)


def mounted_below(folder: Path) -> list[Path]:
    """Return the mount points below a folder, the oldest first."""
    places = (Path(mount.mountpoint) for mount in mountinfo.read().mounts)
    return [place for place in places if place.is_relative_to(folder)]


def give_back(folder: Path, target: Path) -> None:
    """Make the directory beneath a mount that was not ended in order removable again (S-60)."""
    for note in folder.glob(f"state/kube-datastore/mounts/*/{beneath.NOTE_FILE}"):
        beneath.restore(str(target), note)
