"""Mounts for the semantics suite: made by the real command, ended whatever happens, with S3 clients beside them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.exceptions
import psutil
import yaml

from datastore import controlclient
from tests.patience import eventually
from tests.servers import Server, boto_client
from tests.tools.mounting import COMMAND_TIMEOUT_S, NAME, Client, give_back, manifest

TTL_S = 0.3
"""metadataTTL of the shared mounts, whose tests look at the bucket with other clients too."""
TTL = f"{TTL_S * 1000:.0f}ms"
LISTED_AGAIN = 2.0
"""A directory is believed for so many times as long as it took to list it, if that is more (S-28)."""
PATIENCE_S = 60.0
"""Longest wait for what should come within a second: the machine may be busy."""


@dataclass(kw_only=True)
class CommandMount:
    """A mount that the real command makes on one machine, which keeps its state in `folder` from one to the next."""

    folder: Path
    transport: str = "kernel"
    spec: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    pids: list[int] = field(default_factory=list)
    listing_s: float = 0.0

    def manifest(self) -> str:
        """Return the manifest of the Datastore."""
        return yaml.safe_dump(
            {
                "apiVersion": "datastore.dev/v1alpha1",
                "kind": "Datastore",
                "metadata": {"name": NAME},
                "spec": {**self.backend(), **self.spec},
            }
        )

    def backend(self) -> dict[str, Any]:
        """Return the part of the spec that says where the data is."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        """Where it is mounted."""
        return self.folder / "mnt"

    def mount(self) -> None:
        """Mount. Errors: AssertionError with what the command said."""
        done = self.try_mount()
        assert done.returncode == 0, done.stderr
        told = self.told()
        self.pids = [told["supervisorPid"], told["serverPid"]]
        _mounts[id(self)] = self

    def try_mount(self, *options: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Mount, whatever comes of it. text: another manifest."""
        for directory in (self.folder, self.folder / "run"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.folder / "datastore.yaml"
        file.write_text(text or self.manifest())
        chosen = ("--transport", self.transport, *self.options, *options)
        return self.command("mount", *chosen, file, NAME, self.path)

    def command(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """`datastore ARGUMENTS` on this machine, bounded."""
        return Client(self.folder).command(*arguments)

    def status(self) -> dict[str, Any]:
        """`datastore status -o json`."""
        done = self.command("status", "-o", "json", self.path)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def told(self) -> dict[str, Any]:
        """The same from the mount server itself, without the second that a command takes."""
        (state_dir,) = (self.folder / "state/kube-datastore/mounts").iterdir()
        return dict(controlclient.ask(state_dir, {"op": "status"}, PATIENCE_S, controlclient.STATUS_BYTES))

    def umount(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`datastore umount`."""
        return self.command("umount", *options, self.path)

    def remount(self) -> None:
        """Unmount and mount again: what is seen afterwards came from the bucket (or the state on disk)."""
        done = self.umount()
        assert done.returncode == 0, done.stderr
        self.mount()

    def kill_server(self) -> None:
        """kill -9 of the serving process; the supervisor starts another."""
        os.kill(self.pids[1], signal.SIGKILL)

    def kill(self) -> None:
        """kill -9 of everything that serves this mount."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(map(runs, self.pids)), f"processes {self.pids} are gone")

    def end(self) -> None:
        """Leave nothing: by the command, and if that fails by force."""
        _mounts.pop(id(self), None)
        if os.path.ismount(self.path) or _is_dead(self.path):
            if self.umount().returncode != 0:
                self.umount("--force")
            if os.path.ismount(self.path) or _is_dead(self.path):
                subprocess.run(["umount", "--lazy", str(self.path)], check=False)
        if any(_serves(pid) for pid in self.pids):
            self.kill()
        give_back(self.folder, self.path)


@dataclass
class Mount(CommandMount):
    """One of a bucket."""

    server: Server
    bucket: str

    def manifest(self) -> str:
        """Return the manifest of the Datastore, with its Secret."""
        return manifest(self.server, self.bucket, **self.spec)

    @property
    def objects(self) -> Objects:
        """The same bucket for another tool."""
        return Objects(self.server, self.bucket)

    def sent_bytes(self) -> int:
        """Bytes that this mount uploaded so far."""
        return sum(tally["sent_bytes"] for tally in self.told()["store"].values())

    def calls(self) -> dict[str, int]:
        """Requests to the store so far, by method."""
        return {name: tally["calls"] for name, tally in self.told()["store"].items()}


@dataclass
class Objects:
    """A bucket, or what is below a prefix of it, as another S3 tool sees it."""

    server: Server
    bucket: str
    prefix: str = ""

    def key(self, rest: str = "") -> str:
        """The whole key."""
        return self.prefix + rest

    def put(self, rest: str, body: bytes = b"", content_type: str = "", **metadata: str) -> None:
        """PutObject."""
        more = {"ContentType": content_type} if content_type else {}
        _client(self.server).put_object(Bucket=self.bucket, Key=self.key(rest), Body=body, Metadata=metadata, **more)

    def put_empty(self, names: Iterable[str]) -> None:
        """Many empty objects, side by side."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.put, names))

    def get(self, rest: str) -> bytes:
        """GetObject."""
        body: bytes = _client(self.server).get_object(Bucket=self.bucket, Key=self.key(rest))["Body"].read()
        return body

    def head(self, rest: str) -> dict[str, Any]:
        """HeadObject."""
        answer: dict[str, Any] = _client(self.server).head_object(Bucket=self.bucket, Key=self.key(rest))
        return answer

    def metadata(self, rest: str) -> dict[str, str]:
        """User metadata."""
        return dict(self.head(rest)["Metadata"])

    def delete(self, rest: str) -> None:
        """DeleteObject."""
        _client(self.server).delete_object(Bucket=self.bucket, Key=self.key(rest))

    def exists(self, rest: str) -> bool:
        """Whether HeadObject finds it."""
        try:
            self.head(rest)
        except botocore.exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            return False
        return True

    def keys(self, below: str = "") -> list[str]:
        """Every key below it, without the prefix."""
        asked = {"Bucket": self.bucket, "Prefix": self.key(below)}
        pages = _client(self.server).get_paginator("list_objects_v2").paginate(**asked)
        return [found["Key"][len(self.prefix) :] for page in pages for found in page.get("Contents", ())]


class Area(Objects):
    """A directory of a shared mount for one test, and its keys."""

    def __init__(self, mount: Mount, name: str) -> None:
        super().__init__(mount.server, mount.bucket, f"{name}/")
        self.mount, self.name, self.path = mount, name, mount.path / name
        self.is_native = mount.transport == "kernel"
        """Served by our own engine, not through libfuse."""


@contextlib.contextmanager
def mounted(
    server: Server,
    bucket: str,
    home: Path,
    transport: str = "kernel",
    *,
    folder: Path | None = None,
    options: tuple[str, ...] = (),
    **spec: Any,
) -> Iterator[Mount]:
    """A mount of a machine of its own (or of `folder`), ended at the end. home: a directory with a short path.

    options: of the command, each time that it mounts.
    """
    folder = folder or Path(tempfile.mkdtemp(prefix="m", dir=home))
    made = Mount(server, bucket, folder=folder, transport=transport, spec=spec, options=options)
    try:
        made.mount()
        yield made
    finally:
        made.end()


def rclone(server: Server, *arguments: str | Path, text: bytes = b"") -> str:
    """Run rclone, which knows the server as `s3:`; text: its standard input. What it printed."""
    settings = {
        "TYPE": "s3",
        "PROVIDER": "Other",
        "ENDPOINT": server.endpoint,
        "ACCESS_KEY_ID": server.access_key,
        "SECRET_ACCESS_KEY": server.secret_key,
        "REGION": server.region,
        "FORCE_PATH_STYLE": "true",
    }
    env = {**os.environ, **{f"RCLONE_CONFIG_S3_{name}": value for name, value in settings.items()}}
    command = ["rclone", "--config", "/dev/null", *map(str, arguments)]
    done = subprocess.run(command, env=env, input=text, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor, closed at the end."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def python(program: str, *arguments: str | Path) -> str:
    """What a program prints that is a process of its own, and succeeds."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout


@contextlib.contextmanager
def user(program: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A program that says "in use" when it uses the mount; killed at the end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "in use\n"
            yield process
        finally:
            process.kill()


def runs(pid: int) -> bool:
    """Whether any thread of the process does; init may leave the entry of one that ended there for seconds."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def settle(ttl_s: float = TTL_S) -> None:
    """Let a metadataTTL run out: what is promised holds from then on, so polling would prove less.

    Where the machine was busy, that of a directory that took long to list.
    """
    time.sleep(max(ttl_s, LISTED_AGAIN * sum(map(_listing_s, _mounts.values()))) + 0.05)


def _listing_s(mount: CommandMount) -> float:
    """Seconds for which a mount has waited for listings since this was last asked."""
    try:
        store = mount.told().get("store", {})
    except (controlclient.NotAnswering, OSError, ValueError):
        return 0.0  # it is gone, or a new server is on its way
    before, now = mount.listing_s, float(store.get("list_page", {}).get("seconds", 0.0))
    mount.listing_s = now
    return max(0.0, now - before)


def fails(code: int, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """The call must end with this errno."""
    seen = error_of(call, *arguments, **named)
    assert seen == code, f"{errno.errorcode.get(seen, 'no error')}, not {errno.errorcode[code]}"


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> int:
    """The errno with which a call ends, or 0."""
    try:
        call(*arguments, **named)
    except OSError as error:
        return error.errno or -1
    return 0


_mounts: dict[int, CommandMount] = {}
"""Those that there are."""
_clients: dict[str, Any] = {}


def _client(server: Server) -> Any:
    if server.endpoint not in _clients:
        _clients[server.endpoint] = boto_client(server)
    return _clients[server.endpoint]


def _serves(pid: int) -> bool:
    try:
        return "datastore.fuse" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def _is_dead(path: Path) -> bool:
    """A mount whose server is gone: stat fails, so ismount says no."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False
