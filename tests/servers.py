"""Real S3 servers for tests and scripts: versitygw, MinIO and moto, each a process of its own on a free local port.

Context managers (`run_versitygw`, `run_minio`, `run_moto`) are for scripts; the session fixtures `versitygw`,
`versitygw_tls`, `minio` and `moto` are for tests (`pytest_plugins = ["tests.servers"]` in the root conftest). A fixture
whose binary is missing skips with the reason, and fails when CI=true. Servers hold their data in a temporary directory
and end with the block.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import psutil
import pytest

from tests.authority import HERE, Authority, Identity

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class ServerMissing(Exception):
    """The server's binary is not installed; the text says where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. name: 'versitygw', 'minio' or 'moto'; data_dir: where it keeps objects ('' for moto).
    ca_file: the file with the certificate authority of a server that speaks TLS, else ''."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"
    data_dir: str = ""
    pid: int = 0
    ca_file: str = ""

    @property
    def ca_bundle(self) -> str:
        """The content of ca_file, for a manifest."""
        return Path(self.ca_file).read_text() if self.ca_file else ""


def tools_dir() -> Path:
    """The directory in which `make tools` puts binaries."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("KUBE_DATASTORE_TOOLS") or Path(cache, "kube-datastore", "tools")) / "bin"


def find_tool(name: str) -> str:
    """Return the path of a built tool. Errors: ServerMissing."""
    path = tools_dir() / name
    if not os.access(path, os.X_OK):
        raise ServerMissing(f"{name} is not in {path.parent} (make tools or make cluster-tools builds it)")
    return str(path)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a TCP port of 127.0.0.1 for the block; connections are refused until a server listens.

    That server has to set SO_REUSEADDR: Linux then lets it bind beside this socket, which does not listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 that is no ephemeral port, so that the system gives it to no other socket.

    The port stays free while its server is away, and a client that keeps connecting to it can't connect to itself.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = max(1024, first // 2)
    while True:
        # If the ephemeral range has all ports that a user may bind, the system chooses one of them.
        port = random.SystemRandom().randrange(lowest, first) if lowest < first else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])


def boto_client(server: Server) -> Any:
    """Return a boto3 S3 client of the server, as another tool beside the mount."""
    config = botocore.config.Config(
        s3={"addressing_style": "path"},
        retries={"mode": "standard", "max_attempts": 3},
        connect_timeout=5,
        read_timeout=30,
        proxies={},
        # versitygw can't parse some of the chunks with a trailer that boto3 sends over TLS.
        request_checksum_calculation="when_required" if server.ca_file else "when_supported",
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
        config=config,
        verify=server.ca_file or None,
    )


def make_bucket(server: Server, name: str) -> str:
    """Create the bucket and return its name."""
    client = boto_client(server)
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):  # boto3 asks again if an answer does not come
        client.create_bucket(Bucket=name)
    return name


@contextmanager
def run_versitygw(
    *extra: str,
    port: int = 0,
    data_dir: str = "",
    secret_key: str = "testsecret-versitygw",
    identity: Identity | None = None,
) -> Iterator[Server]:
    """Run versitygw over a directory. extra: more global options; port and data_dir: to start it again in its place.
    identity: the server speaks TLS with this certificate."""
    binary = find_tool("versitygw")
    shown = ("--cert", str(identity.certificate), "--key", str(identity.key)) if identity else ()
    with _directory(data_dir) as root:
        keys = _Keys("testaccess", secret_key, str(identity.authority) if identity else "")

        def command(at: int) -> list[str]:
            listen = ["--port", f"127.0.0.1:{at}", "--health", "/healthz"]
            return [binary, "--quiet", "--keep-alive", *listen, *shown, *extra, "posix", root]

        env = {"ROOT_ACCESS_KEY": keys.access, "ROOT_SECRET_KEY": keys.secret}
        with _running("versitygw", command, env, "/healthz", port, tls=identity is not None) as (process, at):
            yield keys.server("versitygw", at, root, process.pid)


@contextmanager
def run_minio(*, port: int = 0, data_dir: str = "", identity: Identity | None = None) -> Iterator[Server]:
    """Run MinIO with one drive. port, data_dir and identity: as of run_versitygw()."""
    binary = find_tool("minio")
    with _directory(data_dir) as root, _directory("") as shown:
        keys = _Keys("testaccess", "testsecret-minio", str(identity.authority) if identity else "")
        if identity:
            shutil.copy(identity.certificate, Path(shown, "public.crt"))
            shutil.copy(identity.key, Path(shown, "private.key"))

        def command(at: int) -> list[str]:
            listen = ["--address", f"127.0.0.1:{at}", "--console-address", "127.0.0.1:0", "--certs-dir", shown]
            return [binary, "server", "--quiet", *listen, root]

        env = {
            "MINIO_ROOT_USER": keys.access,
            "MINIO_ROOT_PASSWORD": keys.secret,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_SITE_REGION": "us-east-1",
            "HOME": root,
        }
        with _running("minio", command, env, "/minio/health/cluster", port, tls=identity is not None) as (process, at):
            server = keys.server("minio", at, root, process.pid)
            _wait_for_listing(server)
            yield server


@contextmanager
def run_moto(*, port: int = 0) -> Iterator[Server]:
    """Run moto's server in a separate process; it checks no signature."""
    keys = _Keys("testaccess", "testsecret-moto")

    def command(at: int) -> list[str]:
        return [sys.executable, "-P", str(Path(__file__).with_name("motoserver.py")), str(at)]

    env = {"PYTHONWARNINGS": "ignore"}
    with _running("moto", command, env, "/moto-api/data.json", port) as (process, at):
        yield keys.server("moto", at, "", process.pid)


@pytest.fixture(scope="session")
def versitygw() -> Iterator[Server]:
    yield from _fixture(run_versitygw())


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority that only those clients trust which are told to."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def versitygw_tls(authority: Authority) -> Iterator[Server]:
    yield from _fixture(run_versitygw(identity=authority.issue("versitygw", HERE)))


@pytest.fixture(scope="session")
def minio() -> Iterator[Server]:
    yield from _fixture(run_minio())


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    yield from _fixture(run_moto())


def _fixture(runner: AbstractContextManager[Server]) -> Iterator[Server]:
    try:
        server = runner.__enter__()
    except ServerMissing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    try:
        yield server
    finally:
        os.kill(server.pid, signal.SIGKILL)  # on SIGTERM versitygw would wait 10 s for kept-alive connections
        runner.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class _Keys:
    access: str
    secret: str
    ca_file: str = ""

    def server(self, name: str, port: int, root: str, pid: int) -> Server:
        return Server(
            name=name,
            endpoint=_url(port, tls=bool(self.ca_file)),
            access_key=self.access,
            secret_key=self.secret,
            data_dir=root,
            pid=pid,
            ca_file=self.ca_file,
        )


def _url(port: int, *, tls: bool) -> str:
    return f"{'https' if tls else 'http'}://127.0.0.1:{port}"


@contextmanager
def _directory(given: str) -> Iterator[str]:
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="datastore-server-", ignore_cleanup_errors=True) as made:
        yield made


@contextmanager
def _running(
    name: str,
    command: Callable[[int], Sequence[str]],
    env: Mapping[str, str],
    health: str,
    port: int,
    *,
    tls: bool = False,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a server, wait until it is healthy, and stop it. Try another port if ours was taken in between."""
    attempts = 1 if port else 5
    for attempt in range(attempts):
        at = port or free_port()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command(at), env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                if _healthy(process, at, _url(at, tls=tls) + health):
                    yield process, at
                    return
            finally:
                _stop(process)
            if attempt == attempts - 1:
                log.seek(0)
                text = log.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"{name} did not start on port {at}: {text}")


def _healthy(process: subprocess.Popen[bytes], port: int, url: str) -> bool:
    # The certificate is not checked, because some tests want a wrong one.
    anyone = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=anyone))
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            try:
                with opener.open(url, timeout=5) as answer:
                    if answer.status == 200 and _listens(process, port):
                        return True
            except urllib.error.HTTPError as error:
                error.close()  # from Python 3.14 on, one that is left open is warned of
        time.sleep(0.05)
    return False


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether this process listens on the port, and not one that took the port before it."""
    with contextlib.suppress(psutil.Error):
        sockets = psutil.Process(process.pid).net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)
    return False


def _wait_for_listing(server: Server) -> None:
    """Wait until the server answers requests: MinIO reports that it is healthy a little before it serves."""
    client = boto_client(server)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.list_buckets()
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(START_TIMEOUT_S)
