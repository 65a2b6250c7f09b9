"""What a tenant can and can't get from a node through the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from datastore.csi.mountdaemon.protocol import handles_of
from datastore.csi.request import key_of
from datastore.csi.spec import csi_pb2 as csi
from datastore.fuse.confinement import CAPABILITIES
from tests.csi.accounts import Accounts, run_accounts
from tests.csi.driver import Driver, Pod, context_of, secrets_of, until
from tests.csi.takenover import check_confined, check_reaches_nothing
from tests.hostile import servers
from tests.hostile.servers import Hostile, hostile, redirecting
from tests.promises import promise
from tests.servers import Server, boto_client, make_bucket

pytestmark = pytest.mark.fuse
INLINE = {"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.namespace": "team"}


@pytest.fixture
def strict(directory: Path) -> Iterator[Driver]:
    """A node whose administrator has allowed nothing."""
    made = Driver(directory, {"ALLOW_RANGES": ""})
    try:
        made.start()
        yield made
    finally:
        made.close()


@promise("S-203")
@pytest.mark.parametrize("inline", [True, False])
def test_a_node_asks_no_private_server_unless_the_administrator_allows_it(
    strict: Driver, versitygw: Server, inline: bool
) -> None:
    with hostile(servers.page) as server:
        where = {"bucket": "data", "endpoint": server.endpoint}
        context = {**where, **INLINE} if inline else {"datastore.dev/spec": json.dumps({"s3": where})}
        pod = Pod(strict, "csi-1" if inline else "team/data/1", context, secrets_of(versitygw))
        with pytest.raises(grpc.RpcError) as refused:
            pod.publish() if inline else pod.stage()

    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    said = "127.0.0.1 is an address of this machine; an administrator of the cluster may allow it"
    assert said in str(refused.value.details())
    assert server.heads == []


@promise("S-203")
def test_the_author_of_a_pod_cannot_set_the_administrators_fields(strict: Driver, versitygw: Server) -> None:
    with hostile(servers.page) as server:
        context = {"bucket": "data", "endpoint": server.endpoint, "datastore.dev/class": "fast", **INLINE}
        pod = Pod(strict, "csi-1", context, secrets_of(versitygw))
        with pytest.raises(grpc.RpcError) as refused:
            pod.publish()

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.heads == []


@promise("S-203", "S-116")
def test_the_server_of_a_class_is_the_administrators_choice(strict: Driver, versitygw: Server, bucket: str) -> None:
    spec = {"s3": {"bucket": bucket, "endpoint": versitygw.endpoint}}
    context = {"datastore.dev/spec": json.dumps(spec), "datastore.dev/class": "fast"}
    pod = Pod(strict, "team/data/1", context, secrets_of(versitygw))
    (pod.start() / "x").write_text("x")
    pod.end()


BODY = bytes(range(256)) * 800


@pytest.fixture
def shared() -> Iterator[tuple[Accounts, str]]:
    """Yield a bucket with `file`: its owner may read it, and user `lister` may only list the bucket."""
    with run_accounts() as accounts:
        bucket = make_bucket(accounts.server, "shared-data")
        owner = boto_client(accounts.server)
        owner.put_object(Bucket=bucket, Key="file", Body=BODY, Metadata={"mode": "33184"})
        accounts.create("lister", "lister-secret", "user")
        statement = {
            "Effect": "Allow",
            "Principal": {"AWS": ["lister"]},
            "Action": ["s3:ListBucket"],
            "Resource": [f"arn:aws:s3:::{bucket}"],
        }
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        owner.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        yield accounts, bucket


LISTER = {"AWS_ACCESS_KEY_ID": "lister", "AWS_SECRET_ACCESS_KEY": "lister-secret"}


@promise("S-205")
def test_one_tenant_does_not_read_what_another_one_has_cached(driver: Driver, shared: tuple[Accounts, str]) -> None:
    """This user may list the bucket, and so knows each version, but may not read it."""
    accounts, bucket = shared
    context = context_of(accounts.server, bucket, readOnly=True)
    owner = Pod(driver, "team-a/data/1", context, secrets_of(accounts.server))
    other = Pod(driver, "team-b/data/2", context, LISTER, name="pod-b")
    assert (owner.start() / "file").read_bytes() == BODY
    seen = other.start()
    assert [each.name for each in seen.iterdir()] == ["file"]
    with pytest.raises(PermissionError):
        (seen / "file").read_bytes()
    other.end()
    owner.end()


@promise("S-205")
def test_a_volume_with_other_keys_reads_nothing_that_its_former_keys_read(
    driver: Driver, shared: tuple[Accounts, str]
) -> None:
    """The volume returns to the node with another Secret."""
    accounts, bucket = shared
    context = context_of(accounts.server, bucket)
    first = Pod(driver, "team-a/data/1", context, secrets_of(accounts.server))
    time.sleep(1.1)  # what was changed within the second is not remembered
    assert (first.start() / "file").stat().st_mode & 0o777 == 0o640
    assert (first.target / "file").read_bytes() == BODY
    first.end()
    for listed in (False, True):
        again = Pod(driver, "team-a/data/1", context_of(accounts.server, bucket, readOnly=listed), LISTER)
        file = again.start() / "file"
        with pytest.raises(PermissionError):
            file.read_bytes() if listed else file.stat()
        again.end()


@pytest.fixture
def small(directory: Path) -> Iterator[Driver]:
    """A node with little room for caches."""
    made = Driver(directory, {"CACHE_SIZE_VOLUME": "8Mi", "CACHE_SIZE_NODE": "12Mi", "MAX_VOLUMES": "3"})
    try:
        made.start()
        yield made
    finally:
        made.close()


def on_disk(directory: str) -> int:
    total = 0
    for at, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # the server has just given it up
                total += os.stat(os.path.join(at, name)).st_blocks * 512
    return total


@promise("S-206", "S-208")
def test_no_manifest_takes_more_of_the_disk_than_the_administrator_gives(
    small: Driver, versitygw: Server, bucket: str
) -> None:
    """One tenant requests 900 TiB, then another tenant's volume is mounted."""
    assert small.node("NodeGetInfo", csi.NodeGetInfoRequest()).max_volumes_per_node == 3
    body = bytes(24 << 20)
    boto_client(versitygw).put_object(Bucket=bucket, Key="large", Body=body)
    context = context_of(versitygw, bucket, cache={"size": "900Ti"})
    pods = [Pod(small, f"team-{name}/data/1", context, secrets_of(versitygw), name=name) for name in "ab"]
    caches = []
    for pod in pods:
        assert (pod.start() / "large").read_bytes() == body
        caches.append(f"{small.settings.cache_dir}/{key_of(pod.volume_id)}")
    until(lambda: all(on_disk(each) for each in caches), "something is kept of what was read")
    sizes = [on_disk(each) for each in caches]
    assert all(size <= 8 << 20 for size in sizes), sizes
    until(lambda: sum(map(on_disk, caches)) <= 12 << 20, "both have their share of the node's")
    assert all((pod.target / "large").read_bytes() == body for pod in pods)
    assert sum(map(on_disk, caches)) <= 12 << 20
    for pod in pods:
        pod.end()


@promise("S-211", "S-215")
def test_a_mount_server_has_few_rights(driver: Driver, versitygw: Server, bucket: str) -> None:
    """The same holds for the server that replaces it."""
    pod = Pod(driver, "team/data/1", context_of(versitygw, bucket), secrets_of(versitygw))
    (pod.start() / "file").write_text("x")
    assert handles_of(driver.settings.handles_socket) == [], "the daemon answers, so nobody has to ask the plugin"
    before = 0
    for _ in range(2):
        until(lambda: driver.state(pod.volume_id).server_pid not in {0, before}, "a server")  # noqa: B023
        server = check_confined(driver, pod)
        assert (pod.target / "file").read_text() == "x"
        before = server
        os.kill(server, signal.SIGKILL)
    pod.end()


@promise("S-215")
def test_a_hacked_mount_server_reaches_nothing_of_other_tenants(driver: Driver, versitygw: Server, bucket: str) -> None:
    """A node has volumes of two tenants; the server of one tries all attacks."""
    pods = [Pod(driver, f"team-{n}/data/1", context_of(versitygw, bucket), secrets_of(versitygw), name=n) for n in "ab"]
    for pod in pods:
        (pod.start() / f"file-{pod.name}").write_text(pod.name)
    check_reaches_nothing(driver, *pods)
    for pod in pods:
        assert (pod.target / f"file-{pod.name}").read_text() == pod.name
        pod.end()


BARE = """
from pathlib import Path
from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location
from datastore.fuse import confinement

confinement.LEAST_LANDLOCK, confinement._LIBSECCOMP = 1000, "libnone.so"
spec = MountSpec(name="v", mountpoint="/m", source=S3Location(bucket="b"), state_dir="/var/tmp", cache_dir="/var/tmp")
missing = confinement.confine(spec)
(capabilities,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line)
print(len(missing), capabilities)
"""


@promise("S-215")
def test_missing_landlock_or_seccomp_is_reported() -> None:
    """The kernel is older, or the image lacks the library; the other confinements hold."""
    told = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["2", "CapEff:", f"{CAPABILITIES['s3']:016x}"]


@promise("S-215", "S-217")
def test_files_written_by_a_mount_server_cannot_redirect_the_daemon(
    driver: Driver, versitygw: Server, bucket: str
) -> None:
    """A state directory names the neighbour's server as its own before the volume is unmounted."""
    pods = [Pod(driver, f"team-{n}/data/1", context_of(versitygw, bucket), secrets_of(versitygw), name=n) for n in "ab"]
    for pod in pods:
        pod.start()
    hostile_state, neighbour = (driver.state(pod.volume_id) for pod in pods)
    note = Path(hostile_state.state_dir) / "mount.json"
    honest = note.read_bytes()
    note.write_bytes(b"[" * 100_000)
    assert [driver.state(pod.volume_id).server_pid for pod in pods] == [0, neighbour.server_pid]
    note.write_bytes(honest)
    note.write_text(json.dumps({**json.loads(note.read_text()), "serverPid": neighbour.server_pid}))
    assert driver.state(pods[0].volume_id).server_pid == 0
    os.kill(hostile_state.supervisor_pid, signal.SIGKILL)  # who replaces it kills the server that the note names
    until(lambda: driver.state(pods[0].volume_id).server_pid not in {0, hostile_state.server_pid}, "another server")
    assert driver.state(pods[1].volume_id).server_pid == neighbour.server_pid
    for pod in pods:
        pod.end()


@pytest.fixture
def metadata_service() -> Iterator[Hostile]:
    """The address to which a redirect would lead."""
    with hostile(servers.page) as server:
        yield server


@promise("S-200")
def test_a_node_reads_only_from_the_server_that_was_named(
    driver: Driver, versitygw: Server, metadata_service: Hostile
) -> None:
    """A pod reads through the real mount."""
    with hostile(redirecting(f"{metadata_service.endpoint}/latest/meta-data/iam")) as server:
        spec = {"s3": {"bucket": "data", "endpoint": server.endpoint}, "readOnly": True}
        pod = Pod(driver, "team/data/1", {"datastore.dev/spec": json.dumps(spec)}, secrets_of(versitygw))
        folder = pod.start()
        assert [each.name for each in folder.iterdir()] == ["file"]
        with pytest.raises(OSError, match="Input/output error"):
            (folder / "file").read_bytes()
        pod.end()

    assert metadata_service.heads == []
