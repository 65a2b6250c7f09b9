"""The controller as a process of this machine, with the rights of its service account and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kube import Kube, Manifest
from tests.servers import Server, free_port

SYSTEM = "datastore-system"
ACCOUNT = "datastore-controller"
START_S = 60.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Controller:
    """A running controller. log: what it wrote."""

    port: int
    log: Path
    pid: int

    def status(self, path: str) -> int:
        """HTTP status of an endpoint; 0 when nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def calls(self) -> set[tuple[str, str]]:
        """(resource, verb) of every request made to the API server but watches."""
        pattern = re.compile(r'^datastore_controller_api_requests_total\{resource="([^"]+)",verb="([^"]+)"\}', re.M)
        return {(found[1], found[2]) for found in pattern.finditer(self.metrics())}

    def peak_mib(self) -> float:
        """Most memory it ever had."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024


def account_kubeconfig(admin: Path, kube: Kube, folder: Path) -> Path:
    """A kubeconfig with the token of the controller's service account."""
    token = kube.kubectl("create", "token", ACCOUNT, "--namespace", SYSTEM, "--duration", "2h").strip()
    document = yaml.safe_load(admin.read_text())
    document["users"] = [{"name": user["name"], "user": {"token": token}} for user in document["users"]]
    path = folder / "account.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def controller(kubeconfig: Path, folder: Path, *arguments: str, name: str = "c-1") -> Iterator[Controller]:
    """Run it for the time of the block, ready at its beginning; it must end by itself when told to."""
    port, log = free_port(), folder / f"{name}.log"
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": SYSTEM, "POD_NAME": name}
    command = [sys.executable, "-m", "datastore.controller", "--port", str(port), "--heartbeat", "2s", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        running = Controller(port, log, process.pid)
        until = time.monotonic() + START_S
        while running.status("/readyz") != 200:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def secret_of(server: Server, name: str = "keys", **other: str) -> Manifest:
    keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key, **other}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": keys}


def datastore_of(name: str, spec: Mapping[str, Any]) -> Manifest:
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": name}, "spec": dict(spec)}


def condition(body: Manifest | None, kind: str) -> Mapping[str, str]:
    """One condition, or nothing."""
    conditions = ((body or {}).get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})
