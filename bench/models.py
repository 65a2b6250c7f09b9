"""M1: saving a model from the disk and from a bucket of the same server, compared with `rclone copy` of the files.

Ours reads every byte for the digests and creates a version with a manifest; rclone only copies. Between buckets rclone
lets the server copy and reads nothing itself ("rclone"), or has to download and upload everything, as between two
servers ("rclone-through"). Each begins with a cold page cache; the client's processor time is printed too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.bars import OURS
from bench.cell import Cell, Group
from bench.metrics import Figure
from bench.processes import drop_caches
from tests.servers import Server, boto_client

COMMAND = str(Path(sys.executable).with_name("datastore"))
RCLONE, THROUGH = "rclone", "rclone-through"
DATA, STORE, COPIES = "bench-data", "bench-models", "bench-copies"
OPTIONS = ("--transfers", "16", "--checkers", "16", "--s3-upload-concurrency", "8", "--s3-chunk-size", "16M")
"""Options of rclone, as set by a user who wants speed and has read the manual."""
METRICS = ("M1.large_disk", "M1.small_disk", "M1.large_bucket", "M1.small_bucket")
_BLOCK = 8 << 20


def save_models(cell: Cell) -> None:
    """Measure a model of large files and one of small files, each from the disk and then from a bucket."""
    sizes = cell.sizes
    server = cell.bench.server
    client = boto_client(server)
    for bucket in (DATA, STORE, COPIES):
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=bucket)
    folder = cell.bench.folder / "m1"
    folder.mkdir(exist_ok=True)
    (folder / "project.yaml").write_text(_manifest(server))
    (folder / "rclone.conf").write_text("".join(map(_remote, ("a", "b"), (server, server))))
    for name, count, size in (
        ("large", sizes.model_files, sizes.model_bytes // sizes.model_files),
        ("small", sizes.model_small_files, sizes.model_small_bytes),
    ):
        source = folder / name
        _plant(source, count, size)
        with _measured(cell, f"M1.{name}_disk", OURS):
            _run(cell, _ours(folder, name, str(source)))
        _forget(cell, folder, name)
        with _measured(cell, f"M1.{name}_disk", RCLONE):
            _run(cell, _rclone(folder, "copy", str(source), f"a:{DATA}/{name}"))
        shutil.rmtree(source)
        with _measured(cell, f"M1.{name}_bucket", OURS):
            _run(cell, _ours(folder, name, f"data/{name}"))
        _forget(cell, folder, name)
        for subject, target in ((RCLONE, "a"), (THROUGH, "b")):
            with _measured(cell, f"M1.{name}_bucket", subject):
                _run(cell, _rclone(folder, "copy", f"a:{DATA}/{name}", f"{target}:{COPIES}/{name}"))
            _run(cell, _rclone(folder, "purge", f"a:{COPIES}/{name}"))
        _run(cell, _rclone(folder, "purge", f"a:{DATA}/{name}"))


@contextlib.contextmanager
def _measured(cell: Cell, metric: str, subject: str) -> Iterator[None]:
    """Record the seconds of the block for `subject`, even one that is no Subject; skip rclone if not installed."""
    if subject != OURS and shutil.which("rclone") is None:
        yield
        return
    drop_caches()
    before, began = _processor_s(), time.monotonic()
    error = ""
    try:
        yield
    except (RuntimeError, OSError, subprocess.SubprocessError) as failure:
        error = " ".join(str(failure).split())[-300:]
    seconds, used = time.monotonic() - began, _processor_s() - before
    cell.bench.results.add(subject, metric, Figure(seconds, error=error, load=cell.load))
    cell.bench.say(f"{subject:>14}  {metric:<16} {error or f'{seconds:.1f} s, {used:.1f} s of processor'}")


def _run(cell: Cell, command: Sequence[str]) -> None:
    """Run a command, but not an rclone that is not installed. Errors: RuntimeError with its stderr; TimeoutExpired."""
    if command[0] == "rclone" and shutil.which("rclone") is None:
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=cell.sizes.model_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-300:]}")


def _ours(folder: Path, name: str, source: str) -> list[str]:
    return [COMMAND, "model", "save", name, "--from", source, "-f", str(folder / "project.yaml"), "--store", "models"]


def _rclone(folder: Path, verb: str, *arguments: str) -> list[str]:
    return ["rclone", "--config", str(folder / "rclone.conf"), verb, *arguments, *OPTIONS]


def _forget(cell: Cell, folder: Path, name: str) -> None:
    """Delete the version, so that the next save writes everything again."""
    for number in (1, 2, 3, 4):
        with contextlib.suppress(RuntimeError):
            _run(
                cell,
                [
                    COMMAND,
                    "model",
                    "delete",
                    f"{name}:{number}",
                    "-f",
                    str(folder / "project.yaml"),
                    "--store",
                    "models",
                ],
            )


def _manifest(server: Server) -> str:
    spec = f'endpoint: "{server.endpoint}", region: {server.region}, forcePathStyle: true, credentialsSecret: keys'
    stores = [
        f"apiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {{name: {name}}}\n"
        f"spec: {{s3: {{bucket: {bucket}, {spec}}}}}\n---\n"
        for name, bucket in (("data", DATA), ("models", STORE))
    ]
    keys = f"AWS_ACCESS_KEY_ID: {server.access_key}, AWS_SECRET_ACCESS_KEY: {server.secret_key}"
    return "".join(stores) + f"apiVersion: v1\nkind: Secret\nmetadata: {{name: keys}}\nstringData: {{{keys}}}\n"


def _remote(name: str, server: Server) -> str:
    return (
        f"[{name}]\ntype = s3\nprovider = Other\nendpoint = {server.endpoint}\nregion = {server.region}\n"
        f"access_key_id = {server.access_key}\nsecret_access_key = {server.secret_key}\nforce_path_style = true\n"
    )


def _plant(folder: Path, count: int, size: int) -> None:
    """Write files of incompressible bytes, a hundred in a folder, and sync them to the disk."""
    for number in range(count):
        place = folder / f"{number // 100:03}"
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"f{number:05}").open("wb") as file:
            for start in range(0, size, _BLOCK):
                file.write(os.urandom(min(_BLOCK, size - start)))
    os.sync()


def _processor_s() -> float:
    """The processor time of all commands that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


GROUPS = (Group(("M1",), save_models, METRICS, needs_data=False, only=frozenset({OURS})),)
