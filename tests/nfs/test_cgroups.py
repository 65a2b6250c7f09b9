"""The limits of memory on a kernel with cgroup version 2, which a guest has also where this machine does not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datastore.csi.mountdaemon.cgroups import limit_of
from tests.nfs.host.guest import CHECKOUT, Guest
from tests.promises import promise
from tests.servers import boto_client, make_bucket, run_versitygw

MEMORY = 192 << 20
FILES, FILE_BYTES = 12, 8 << 20
SMALL = 400
FORWARD_TIMEOUT_S = 120.0


@contextmanager
def reached_from(guest: Guest, port: int) -> Iterator[None]:
    """A server on this machine's loopback is on the guest's, at the same port."""
    command = guest.ssh_command()
    forward = ["-R", f"{port}:127.0.0.1:{port}", command[-1]]
    subprocess.run(
        [*command[:-1], "-O", "forward", *forward], check=True, timeout=FORWARD_TIMEOUT_S, capture_output=True
    )
    try:
        yield
    finally:
        subprocess.run(
            [*command[:-1], "-O", "cancel", *forward], check=False, timeout=FORWARD_TIMEOUT_S, capture_output=True
        )


@promise("S-118", "S-239")
@pytest.mark.timeout(900, func_only=True)
def test_a_mount_keeps_below_its_limit_and_ends_alone_when_it_is_met(nfs_client: Guest) -> None:
    nfs_client.shell("mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup")
    with run_versitygw() as server:
        client, bucket = boto_client(server), make_bucket(server, "ceiling")
        for number in range(FILES):
            client.put_object(Bucket=bucket, Key=f"large/{number}", Body=bytes([number]) * FILE_BYTES)
        for number in range(SMALL):
            client.put_object(Bucket=bucket, Key=f"small/{number}", Body=b"x")
        with reached_from(nfs_client, int(server.endpoint.rpartition(":")[2])):
            words = (server.endpoint, bucket, str(MEMORY), server.access_key, server.secret_key)
            command = f"cd {CHECKOUT} && .venv/bin/python -m tests.csi.on_version_2 {' '.join(words)}"
            said = json.loads(nfs_client.shell(command, timeout_s=700).splitlines()[-1])
    print(said)
    assert said["read"] == FILES * FILE_BYTES + SMALL
    assert said["limit"] == limit_of(MEMORY)
    assert said["kills"] == 0
    assert said["same_server"]
    assert said["resident"] < MEMORY
    assert (said["overgrown"]["limit"], said["overgrown"]["kills"]) == (limit_of(MEMORY), 1)
    assert said["counted"] == 1 + said["overgrown"]["hoarder"]
    assert said["read_again"] in (1, FILE_BYTES), "by the next server"
