"""The main job from end to end: digits in an S3 bucket, a training script that knows only directories, and its results.

Everything lives in one temporary directory and one process; nothing stays behind, also on a failure or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from PIL import Image
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

HERE = Path(__file__).resolve().parent
MANIFEST_ENDPOINT = "http://127.0.0.1:9000"
KEYS = {"aws_access_key_id": "demo", "aws_secret_access_key": "demo-secret", "region_name": "us-east-1"}
COMMAND_TIMEOUT_S = 120.0

console = Console(highlight=False, soft_wrap=True)


class Stopped(Exception):
    """The demo can't go on; the text says why."""


class Laptop:
    """Somebody's machine: runs commands with a cache of its own, and unmounts what it mounted."""

    def __init__(self, folder: Path, manifest: Path) -> None:
        self.folder = folder
        self.manifest = manifest
        self.mounted: list[Path] = []
        folder.mkdir()
        places = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        programs = str(Path(sys.executable).parent)
        self.environment: Mapping[str, str] = {
            **os.environ,
            **places,
            "XDG_RUNTIME_DIR": str(runtime),
            "PATH": f"{programs}:{os.environ.get('PATH', '')}",
        }

    def run(self, *command: str | Path) -> None:
        """Show a command and run it."""
        words = [str(word) for word in command]
        shown = shlex.join(words).replace(sys.executable, "python")
        for folder in (self.folder.parent, HERE):
            shown = shown.replace(f"{folder}/", "")
        console.print(f"[bold green]$[/] [bold]{shown}[/]")
        try:
            done = subprocess.run(words, env=self.environment, check=False, timeout=COMMAND_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Stopped(str(error)) from error
        if done.returncode != 0:
            raise Stopped(f"{words[0]} {words[1]} ended with exit code {done.returncode}")

    def mount(self, name: str) -> Path:
        """Mount a Datastore of the manifest on a directory of its name."""
        target = self.folder / name
        target.mkdir()
        self.mounted.append(target)
        self.run("datastore", "mount", self.manifest, name, target)
        return target

    def unmount(self) -> None:
        """Unmount all, newest first."""
        while self.mounted:
            self.run("datastore", "umount", self.mounted[-1])
            self.mounted.pop()

    def abandon(self) -> None:
        """Unmount whatever is still mounted, when something went wrong."""
        for target in reversed(self.mounted):
            if os.path.ismount(target):
                subprocess.run(
                    ["datastore", "umount", str(target)], env=self.environment, check=False, timeout=COMMAND_TIMEOUT_S
                )
            if os.path.ismount(target):
                subprocess.run(["fusermount3", "-u", "-z", str(target)], check=False)


@contextlib.contextmanager
def embedded_s3() -> Iterator[tuple[str, Any]]:
    """An S3 server inside this process: its endpoint, and a client of it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        yield endpoint, boto3.client("s3", endpoint_url=endpoint, **KEYS)
    finally:
        server.stop()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Removed at the end, unless something below is still mounted: removal would reach into the bucket."""
    folder = Path(tempfile.mkdtemp(prefix="digits-"))
    try:
        yield folder
    finally:
        still = [
            entry
            for laptop in folder.iterdir()
            if laptop.is_dir()
            for entry in laptop.iterdir()
            if os.path.ismount(entry)
        ]
        if still:
            console.print(f"[red]still mounted, so {folder} is left: {', '.join(map(str, still))}[/]")
        else:
            shutil.rmtree(folder, onerror=_unless_it_vanished)


def _unless_it_vanished(_: object, path: str, error: tuple[Any, BaseException, Any]) -> None:
    """A mount that another mount namespace still had may be ending, and removes its files by itself."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def put_digits(client: Any) -> int:
    """Upload every digit of scikit-learn as a PNG object in the folder of its class."""
    client.create_bucket(Bucket="datasets")
    client.create_bucket(Bucket="models")
    digits = load_digits()

    def put(number: int) -> None:
        picture = io.BytesIO()
        Image.fromarray((digits.images[number] * (255 / 16)).astype("uint8")).save(picture, "PNG")
        key = f"digits/{digits.target[number]}/{number:04}.png"
        client.put_object(Bucket="datasets", Key=key, Body=picture.getvalue(), ContentType="image/png")

    with ThreadPoolExecutor(max_workers=4) as pool:
        uploads = pool.map(put, range(len(digits.images)))
        for _ in track(uploads, "uploading", total=len(digits.images), console=console, transient=True):
            pass
    return len(digits.images)


def show_what_stayed(out: Path) -> None:
    """The three things that other tools lose: checkpoints, an empty directory, a link."""
    latest, logs = out / "latest", out / "logs"
    checkpoints = sorted(path.name for path in out.glob("*.joblib"))
    if not (checkpoints and logs.is_dir() and not any(logs.iterdir()) and latest.is_symlink() and latest.exists()):
        raise Stopped(f"not all is there: {sorted(path.name for path in out.iterdir())}")
    console.print(f"  checkpoints  {', '.join(checkpoints)}")
    console.print("  logs/        an empty directory, still there")
    console.print(f"  latest       a link to {latest.readlink()}, {latest.stat().st_size:,} bytes behind it")


def show_keys(client: Any) -> None:
    """The bucket as every other S3 tool sees it."""
    for found in client.list_objects_v2(Bucket="models")["Contents"]:
        console.print(f"  s3://models/{found['Key']:<26} {found['Size']:>8,} bytes")


def title(text: str) -> None:
    """Say what comes next."""
    console.print(f"\n[bold cyan]{text}[/]")


def demonstrate(folder: Path, endpoint: str, client: Any) -> None:
    """All steps."""
    title("1. A bucket with pictures of handwritten digits")
    console.print(f"  {put_digits(client):,} PNG objects in s3://datasets/digits/, ten folders, at {endpoint}")
    manifest = folder / "datastore.yaml"
    manifest.write_text((HERE / "datastore.yaml").read_text().replace(MANIFEST_ENDPOINT, endpoint))

    with contextlib.ExitStack() as leave:
        title("2. On a laptop both Datastores become directories; the training script knows nothing else")
        laptop = Laptop(folder / "laptop", manifest)
        leave.callback(laptop.abandon)
        pictures, out = laptop.mount("digits"), laptop.mount("digits-out")
        laptop.run(sys.executable, HERE / "train.py", pictures, out)
        laptop.unmount()

        title("3. On another machine, with nothing cached, all of it is there")
        elsewhere = Laptop(folder / "elsewhere", manifest)
        leave.callback(elsewhere.abandon)
        show_what_stayed(elsewhere.mount("digits-out"))
        elsewhere.unmount()

    title("4. And the bucket holds plain objects")
    show_keys(client)


def main() -> int:
    """Run the demo; the exit code."""
    started = time.monotonic()
    try:
        with temporary_folder() as folder, embedded_s3() as (endpoint, client):
            demonstrate(folder, endpoint, client)
    except Stopped as error:
        console.print(f"[red]demo: {error}[/]")
        return 1
    except KeyboardInterrupt:
        console.print("[red]demo: interrupted; everything is unmounted and removed[/]")
        return 130
    console.print(f"\n[bold green]done[/] in {time.monotonic() - started:.0f} s; nothing was left behind")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
