from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from datastore import mountinfo
from datastore.csi.spec import csi_pb2 as csi
from tests.csi.driver import MODES, Driver, Pod, until
from tests.promises import promise

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]
Stored = Callable[[str], bytes]


@promise("S-80")
def test_two_pods_share_one_mount_and_the_bucket_has_what_they_wrote(driver: Driver, pod: Pods, stored: Stored) -> None:
    first, second = pod("pod-a"), pod("pod-b")
    (first.start() / "from-a").write_bytes(b"a" * 100_000)
    assert (second.start() / "from-a").read_bytes() == b"a" * 100_000
    (second.target / "from-b").write_text("b")
    assert (first.target / "from-b").read_text() == "b"
    assert stored("from-b") == b"b"
    assert len(driver.daemon().states()) == 1
    first.unpublish()
    assert (second.target / "from-b").read_text() == "b"
    second.unpublish()
    assert not second.target.exists()
    second.unstage()
    assert mountinfo.read().at(first.staging) is None
    assert driver.daemon().states() == []


@promise("S-81")
def test_calls_for_one_volume_at_the_same_time_wait_for_each_other(pod: Pods) -> None:
    pods = [pod(f"pod-{number}") for number in range(16)]
    pods[0].stage()
    with ThreadPoolExecutor(len(pods)) as pool:
        list(pool.map(lambda each: each.publish(once=True), pods))
        (pods[0].target / "x").write_text("x")
        assert [(each.target / "x").read_text() for each in pods] == ["x"] * len(pods)
        list(pool.map(lambda each: each.unpublish(once=True), pods))


@promise("S-81")
def test_every_call_may_be_repeated(driver: Driver, pod: Pods) -> None:
    first = pod()
    for _ in range(2):
        first.stage()
    for _ in range(2):
        first.publish()
    (first.target / "x").write_text("x")
    assert mountinfo.read().count(str(first.target)) == 1
    for _ in range(2):
        first.unpublish()
    for _ in range(2):
        first.unstage()
    stranger = Pod(driver=driver, volume_id="never/seen/0", context={}, secrets={})
    stranger.unpublish()
    stranger.unstage()


@promise("S-82")
def test_a_read_only_pod_sees_what_a_writing_pod_writes(pod: Pods) -> None:
    writer, reader = pod("writer"), pod("reader", read_only=True)
    (writer.start() / "x").write_text("x")
    reader.start()
    assert (reader.target / "x").read_text() == "x"
    with pytest.raises(OSError, match="Read-only") as refused:
        (reader.target / "y").write_text("y")
    assert refused.value.errno == errno.EROFS
    (writer.target / "y").write_text("y")


@promise("S-82")
def test_a_read_only_pod_is_read_only_for_the_node_too(driver: Driver, pod: Pods) -> None:
    """Otherwise the kubelet, in another mount namespace, would create a missing subPath."""
    pods = driver.directory / "pods"
    pods.mkdir()
    for options in (["--bind", str(pods)], ["--make-shared"]):
        subprocess.run(["mount", *options, str(pods)], check=True)
    unshare = ["unshare", "--mount", "--propagation", "unchanged"]
    node = subprocess.Popen([*unshare, "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
    try:
        assert node.stdout is not None
        assert node.stdout.readline()
        reader = pod("reader", read_only=True)
        reader.start()
        seen = mountinfo.parse(Path(f"/proc/{node.pid}/mountinfo").read_text()).at(str(reader.target))
        assert seen is not None
        assert seen.read_only
        shown = {each.mountpoint for each in mountinfo.read().mounts if each.device == seen.device}
        assert shown == {reader.staging, str(reader.target)}
    finally:
        node.kill()
        node.communicate()


def test_a_volume_whose_access_mode_only_reads_is_mounted_read_only(pod: Pods) -> None:
    reader = pod(mode=MODES.MULTI_NODE_READER_ONLY)
    reader.start()
    mounted = mountinfo.read().at(reader.staging)
    assert mounted is not None
    assert mounted.read_only
    with pytest.raises(OSError, match="Read-only"):
        (reader.target / "y").write_text("y")


def as_user(uid: int, gid: int, place: Path, work: Callable[[], object]) -> int:
    """Return the errno of work that a plain user does in `place`, as a container's user would; 0: success."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.chdir(place)  # nobody but root gets through the kubelet's directories above it
            os.setgroups([gid])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            work()
        except OSError as error:
            code = error.errno or 255
        except BaseException:
            code = 254
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@promise("S-83")
def test_a_pod_with_an_fsgroup_writes_what_root_and_others_made(pod: Pods, stored: Stored) -> None:
    plain = pod("plain")
    plain.start()
    (plain.target / "of-root").mkdir(mode=0o755)
    (plain.target / "of-root" / "x").write_text("x")
    (plain.target / "of-root" / "x").chmod(0o644)
    assert as_user(1000, 3000, plain.target, lambda: Path("y").write_text("y")) == errno.EACCES

    grouped = pod("grouped", group="3000")
    grouped.start()

    def work() -> None:
        with Path("of-root/x").open("a") as file:
            file.write("+")
        Path("new").write_text("new")

    assert as_user(1000, 3000, grouped.target, work) == 0
    assert (grouped.target / "new").stat().st_gid == 3000
    assert stored("of-root/x") == b"x+"
    grouped.unpublish()
    other = pod("other", group="4000")
    with pytest.raises(grpc.RpcError) as refused:
        other.start()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "with fsGroup 3000, until the last pod that has it mounted here ends" in str(refused.value.details())

    plain.unpublish()  # the kubelet does not unstage the volume, for `other` waits for it
    other.start()
    assert as_user(1000, 4000, other.target, lambda: Path("of-root/y").write_text("y")) == 0
    assert as_user(1000, 3000, other.target, lambda: Path("of-root/z").write_text("z")) == errno.EACCES
    assert (other.target / "new").stat().st_gid == 4000


def test_mount_options_choose_the_owner_of_files_without_one(
    pod: Pods, versitygw_put: Callable[[str, bytes], None]
) -> None:
    versitygw_put("plain.txt", b"x")
    owned = pod(flags=("uid=1234", "gid=5678,umask=027"))
    found = (owned.start() / "plain.txt").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1234, 5678, 0o640)
    assert (owned.target.stat().st_mode & 0o777) == 0o750


@promise("S-84")
def test_an_inline_volume_comes_and_goes_with_its_pod(driver: Driver, pod: Pods, bucket: str, stored: Stored) -> None:
    inline = pod(context=inline_context(pod(), bucket))
    inline.volume_id = "csi-0123456789abcdef"
    (inline.publish() / "x").write_text("x")
    assert stored("scratch/x") == b"x"
    inline.unpublish()
    assert not inline.target.exists()
    assert driver.daemon().states() == []
    assert [mount for mount in mountinfo.read().mounts if str(driver.directory) in mount.mountpoint] == []


def inline_context(like: Pod, bucket: str) -> dict[str, str]:
    import json

    endpoint = json.loads(like.context["datastore.dev/spec"])["s3"]["endpoint"]
    return {
        "bucket": bucket,
        "endpoint": endpoint,
        "prefix": "scratch/",
        "csi.storage.k8s.io/ephemeral": "true",
        "csi.storage.k8s.io/pod.namespace": "team",
    }


@promise("S-85")
@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"local": "/etc"}, "local"),
        ({"datastore.dev/spec": '{"local": {"path": "/etc"}}'}, "local"),
        ({"datastore.dev/spec": '{"s3": {"bucket": "b1b"}, "cache": {"dir": "/etc"}}'}, "cache.dir"),
    ],
)
def test_no_pod_reaches_a_directory_of_the_node(pod: Pods, attributes: dict[str, str], said: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        pod(context=attributes).stage()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in str(refused.value.details())


def test_wrong_keys_are_reported_in_the_servers_words_and_leave_nothing(driver: Driver, pod: Pods) -> None:
    wrong = pod(secrets={"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "canary-4711"})
    with pytest.raises(grpc.RpcError) as refused:
        wrong.stage()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "nobody" in str(refused.value.details())
    assert mountinfo.read().at(wrong.staging) is None
    assert "canary" not in str(refused.value.details()) + driver.logs()


@promise("S-86")
def test_stats_answer_at_once_and_say_what_is_wrong(driver: Driver, pod: Pods) -> None:
    first = pod()
    first.start()
    request = csi.NodeGetVolumeStatsRequest(volume_id=first.volume_id, volume_path=str(first.target))
    until(
        lambda: not driver.node("NodeGetVolumeStats", request).volume_condition.abnormal, "its server answers in time"
    )
    well = driver.node("NodeGetVolumeStats", request)
    assert {usage.unit for usage in well.usage} == {csi.VolumeUsage.BYTES, csi.VolumeUsage.INODES}
    state = driver.state(first.volume_id)
    for pid in (state.supervisor_pid, state.server_pid):
        os.kill(pid, 19)  # SIGSTOP: they hang
    try:
        hanging = driver.node("NodeGetVolumeStats", request, timeout_s=40)
    finally:
        for pid in (state.server_pid, state.supervisor_pid):
            os.kill(pid, 18)
    assert hanging.volume_condition.abnormal
    assert "does not answer" in hanging.volume_condition.message


@promise("S-87")
def test_a_volume_that_hangs_keeps_no_other_waiting(driver: Driver, pod: Pods, bucket: str) -> None:
    hanging, other = pod("one"), pod("two")
    other.volume_id = "team/other/5678"
    hanging.start()
    state = driver.state(hanging.volume_id)
    os.kill(state.server_pid, 19)
    try:
        (other.start() / "x").write_text("x")
        hanging.unpublish()
        other.end()
    finally:
        os.kill(state.server_pid, 18)


@promise("S-88")
def test_a_dead_mount_is_found_and_replaced_before_publish(driver: Driver, pod: Pods) -> None:
    first = pod()
    (first.start() / "x").write_text("x")
    driver.close_processes()
    with pytest.raises(OSError, match="not connected"):
        os.stat(first.target)
    driver.start()
    first.publish()
    assert (first.target / "x").read_text() == "x"
    assert mountinfo.read().count(str(first.target)) == 1
    assert mountinfo.read().count(first.staging) == 1
