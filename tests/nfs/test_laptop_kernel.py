"""`datastore mount` by root on a machine whose kernel has the NFS client: a guest."""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.nfs.host.guest import CHECKOUT, RECOVERED_S, Guest
from tests.nfs.host.server import NFSServer
from tests.patience import eventually
from tests.promises import promise
from tests.tools.mounting import NAME

pytestmark = pytest.mark.timeout(900, func_only=True)


@dataclass
class Laptop:
    """A person's places in the guest, and what he calls there."""

    guest: Guest
    server: str
    folder: str = field(default_factory=lambda: f"/run/laptop-{uuid.uuid4().hex[:8]}")

    @property
    def path(self) -> str:
        return f"{self.folder}/mnt"

    def call(self, *words: str) -> str:
        """`datastore WORDS`. Errors: AssertionError with what it said."""
        return self.guest.run(*self._command(*words))

    def _command(self, *words: str) -> list[str]:
        places = [f"XDG_{kind}_HOME={self.folder}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA", "STATE")]
        return ["env", *places, f"{CHECKOUT}/.venv/bin/datastore", *words]

    def mount(self, path: str, *options: str, **nfs: Any) -> None:
        metadata = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": NAME}}
        document = {**metadata, "spec": {"nfs": {"server": self.server, "path": path, **nfs}}}
        self.guest.run("mkdir", "-p", self.folder)
        self.guest.run("tee", f"{self.folder}/datastore.yaml", text=yaml.safe_dump(document))
        self.call("mount", *options, f"{self.folder}/datastore.yaml", NAME, self.path)

    def status(self) -> Any:
        return json.loads(self.call("status", "-o", "json", self.path))

    def doctor(self) -> tuple[str, str]:
        """What `datastore doctor` finds of the export."""
        command = shlex.join(self._command("doctor", "-o", "json", f"{self.folder}/datastore.yaml"))
        found = json.loads(self.guest.shell(f"{command} || true"))[-1]
        assert found["check"] == NAME
        return found["level"], found["text"]

    def mounted(self) -> str:
        """The lines of the mount table for it."""
        return self.guest.shell(f"grep ' {self.path} ' /proc/self/mountinfo || true")


@pytest.fixture
def laptop(nfs_client: Guest, nfs_host: NFSServer) -> Iterator[Laptop]:
    made = Laptop(nfs_client, nfs_host.address)
    yield made
    nfs_client.shell(f"umount -l {made.path} 2>/dev/null || true; rm -rf {made.folder}")


@promise("S-313")
def test_root_mounts_by_the_kernel_and_can_leave_a_server_that_is_away(
    laptop: Laptop, nfs_host: NFSServer, export: Callable[..., str]
) -> None:
    """Without a process of ours. Nothing waits that need not; what was written gets there when it is back."""
    path = export()
    with pytest.raises(AssertionError, match="has no such export for this machine"):
        laptop.mount(f"{path}-not")
    level, said = laptop.doctor()
    assert (level, "NFS version 3: " in said, "there is no such export" in said) == ("warn", True, True)
    assert laptop.guest.shell(f"ls {laptop.folder}") == "datastore.yaml\nstate\n"
    laptop.mount(path, mountOptions=["nconnect=2", "timeo=150"])
    assert " nfs4 " in laptop.mounted()
    assert all(f",{each}," in laptop.mounted() for each in ("nconnect=2", "timeo=150", "vers=4.2"))
    assert "nosuid,nodev" in laptop.mounted()
    laptop.guest.shell(f"echo here >{laptop.path}/x; ln {laptop.path}/x {laptop.path}/y")
    assert nfs_host.shell(f"cat {path}/y; sync") == "here\n"
    seen = laptop.status()
    assert (seen["state"], seen["storage"]) == ("mounted", None)
    assert laptop.doctor() == ("ok", f"nfs://{laptop.server}{path}: the server answers and lets this machine mount it")
    assert seen["via"] == {"transport": "kernel", "why": "root mounts by the kernel's NFS client, here version 4.2"}
    laptop.guest.shell(f"cd {laptop.path}; sleep 3000 >/dev/null 2>&1 & echo $! >/run/user-of-it")
    with pytest.raises(AssertionError, match="busy"):
        laptop.call("umount", laptop.path)
    laptop.guest.shell("kill $(cat /run/user-of-it)")

    nfs_host.cut_power()
    try:
        laptop.guest.stuck(f"echo late >{laptop.path}/late; echo $? >/run/late")
        # Each command has its deadline: one that waited for the server would meet it, and say nothing of this.
        silent = laptop.status()["storage"]
        assert f"the NFS server {nfs_host.address} does not answer" in silent["error"]
        assert "since" not in silent
        level, said = laptop.doctor()
        assert (level, "does not answer on port 2049" in said) == ("fail", True)
        with pytest.raises(AssertionError, match="detaches it anyway"):
            laptop.call("umount", laptop.path)
        laptop.call("umount", "--force", laptop.path)
        assert not laptop.mounted()
    finally:
        nfs_host.start()
        nfs_host.ready()
    eventually(lambda: laptop.guest.shell("cat /run/late || true") == "0\n", "who waited goes on", RECOVERED_S)
    assert nfs_host.shell(f"cat {path}/late") == "late\n"
