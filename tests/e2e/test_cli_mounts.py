"""The command as a person uses it: real mount servers, a real kernel, versitygw as the storage."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server, boto_client, make_bucket
from tests.tools.mounting import COMMAND, Client, manifest, mounted_below

pytestmark = [pytest.mark.e2e_laptop, pytest.mark.fuse, pytest.mark.plain_user, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
CHECKOUT = str(Path(__file__).parents[2])


class Place(NamedTuple):
    """A bucket of its own, a manifest for it, and a machine and a directory of its own."""

    server: Server
    bucket: str
    manifest: Path
    directory: Path
    client: Client

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end; the secret key is never shown."""
        done = self.client.command(*arguments)
        assert self.server.secret_key not in done.stdout + done.stderr
        return done

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a verb."""
        command, environment = [COMMAND, *map(str, arguments)], self.client.environment
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def stored(self) -> list[str]:
        """All keys of the bucket."""
        return [
            each["Key"] for each in boto_client(self.server).list_objects_v2(Bucket=self.bucket).get("Contents", [])
        ]


def write_manifest(path: Path, server: Server, bucket: str) -> None:
    """Of two Datastores over one bucket, and their Secret."""
    again, _, _ = manifest(server, bucket, "again", readOnly=True).partition("---\n")
    path.write_text(again + "---\n" + manifest(server, bucket, "data", metadataTTL="1s"))


@pytest.fixture
def place(versitygw: Server, tmp_path: Path) -> Iterator[Place]:
    bucket = make_bucket(versitygw, f"cli-{uuid.uuid4().hex[:12]}")
    write_manifest(tmp_path / "datastore.yaml", versitygw, bucket)
    (tmp_path / "run").mkdir(mode=0o700)
    found = Place(versitygw, bucket, tmp_path / "datastore.yaml", tmp_path / "mnt", Client(tmp_path))
    yield found
    for each in json.loads(found.run("list", "-o", "json").stdout):
        found.run("umount", "--force", each["mountpoint"])
    assert mounted_below(tmp_path) == []


def content(path: Path) -> bytes:
    """Of a file; nothing of one that the mount server has removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def test_a_directory_is_mounted_written_and_unmounted(place: Place) -> None:
    done = place.run("mount", place.manifest, "data", place.directory)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"data (s3://{place.bucket}/) is mounted at {place.directory}\n"
    (place.directory / "logs").mkdir()
    (place.directory / "a.txt").write_text("hello")
    listed = json.loads(place.run("list", "-o", "json").stdout)
    assert [(each["name"], each["mountpoint"], each["state"]) for each in listed] == [
        ("data", str(place.directory), "mounted")
    ]
    done = place.run("umount", "data")
    assert (done.returncode, done.stdout) == (0, "")
    assert not place.directory.exists()
    assert place.stored() == ["a.txt", "logs/"]
    assert place.run("list", "-o", "json").stdout == "[]\n"


def test_a_mount_through_libfuse_is_the_same_to_its_user(place: Place) -> None:
    assert place.run("mount", "--transport", "libfuse", place.manifest, "data", place.directory).returncode == 0
    (place.directory / "a.txt").write_text("hello")
    assert (place.directory / "a.txt").read_text() == "hello"
    refused = place.run("restart", "data")
    assert (refused.returncode, "it is mounted with --transport libfuse" in refused.stderr) == (5, True), refused.stderr
    assert place.run("umount", place.directory).returncode == 0
    assert place.stored() == ["a.txt"]


def test_metrics_at_what_is_no_address_is_wrong_usage(place: Place) -> None:
    done = place.run("mount", "--metrics", "nonsense", place.manifest, "data", place.directory)
    assert (done.returncode, "--metrics nonsense: an address and a port" in done.stderr) == (2, True), done.stderr
    assert not place.directory.exists()


def test_all_mounts_end_at_once_but_for_what_is_used(place: Place, tmp_path: Path) -> None:
    """Of two, one with an open file: the other one goes, and the first says who uses it."""
    place.run("mount", place.manifest, "data", place.directory)
    (place.directory / "a.txt").write_text("hello")
    place.run("mount", place.manifest, "again", tmp_path / "two")
    assert (tmp_path / "two/a.txt").read_text() == "hello"
    with (place.directory / "a.txt").open() as file:
        done = place.run("umount", "--all")
        assert (done.returncode, f"pid {os.getpid()}" in done.stderr) == (5, True), done.stderr
        assert str(place.directory) in done.stderr
        assert not (tmp_path / "two").exists()
        assert file.read() == "hello"
    assert place.run("umount", "--all").returncode == 0
    assert place.run("umount", "--all").returncode == 0, "there is none left"
    assert mounted_below(tmp_path) == []
    assert place.run("list", "-o", "json").stdout == "[]\n"


@pytest.mark.parametrize("crashed", [False, True])
def test_a_mount_takes_the_place_of_another_one(place: Place, tmp_path: Path, crashed: bool) -> None:
    """What was there is uploaded first; a dead one, which alone would be refused, is removed."""
    place.run("mount", place.manifest, "data", place.directory)
    (place.directory / "a.txt").write_text("hello")
    if crashed:
        told = json.loads(place.run("status", "data", "-o", "json").stdout)
        for pid in (told["supervisorPid"], told["serverPid"]):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: json.loads(place.run("list", "-o", "json").stdout)[0]["state"] == "crashed")
        assert f"datastore umount {place.directory}" in place.run("doctor").stdout
    words = "has crashed" if crashed else "is mounted there already"
    refused = place.run("mount", place.manifest, "again", place.directory)
    assert (refused.returncode, words in refused.stderr) == (5, True), refused.stderr
    done = place.run("mount", "--replace", place.manifest, "again", place.directory)
    assert done.returncode == 0, done.stderr
    assert (place.directory / "a.txt").read_text() == "hello"
    with pytest.raises(OSError, match="Read-only"):
        (place.directory / "b.txt").touch()
    assert len(mounted_below(tmp_path)) == 1


def test_unsent_retry_uploads_what_failed(place: Place) -> None:
    """By `unsent --retry`: 6 while the bucket is gone; when it is back, all is uploaded as the command ends."""
    place.run("mount", place.manifest, "data", place.directory)
    file = (place.directory / "a.txt").open("w")
    file.write("precious")
    shutil.rmtree(Path(place.server.data_dir, place.bucket))
    with pytest.raises(OSError, match="Input/output error"):
        file.close()
    failed = place.run("unsent", "--retry", "data")
    assert (failed.returncode, "NoSuchBucket" in failed.stderr) == (6, True), failed.stderr
    found = json.loads(place.run("doctor", "-o", "json").stdout)
    assert [each["code"] for each in found if "1 files are not uploaded" in each["text"]] == [6]
    make_bucket(place.server, place.bucket)
    done = place.run("unsent", "--retry", "data")
    assert (done.returncode, "everything of data is uploaded" in done.stderr) == (0, True), done.stderr
    assert place.stored() == ["a.txt"]


def test_status_tells_what_is_documented_and_the_secret_key_is_nowhere(place: Place, tmp_path: Path) -> None:
    """In no file, argument or environment."""
    place.run("mount", place.manifest, "data", place.directory)
    (place.directory / "a.txt").write_text("hello")
    told = json.loads(place.run("status", place.directory, "-o", "json").stdout)
    assert (told["name"], told["state"], told["dirty"]) == ("data", "mounted", [])
    assert {"supervisorPid", "serverPid", "cache", "store"} <= set(told)
    documented = (Path(CHECKOUT) / "docs/reference/cli.md").read_text()
    assert {key for key in told if f"`{key}`" not in documented} == set()
    assert place.run("status").stdout.startswith("data\n")
    walked = (*os.walk(tmp_path / "state"), *os.walk(tmp_path / "cache"))
    kept = [path for at, _, names in walked for name in names if (path := Path(at, name)).is_file()]
    facts = [
        Path(f"/proc/{told[pid]}", name) for pid in ("supervisorPid", "serverPid") for name in ("cmdline", "environ")
    ]
    secret = place.server.secret_key.encode()
    assert kept
    assert [path for path in (*kept, *facts) if secret in content(path)] == []


def test_warm_fills_the_cache(place: Place) -> None:
    client = boto_client(place.server)
    for number in range(5):
        client.put_object(Bucket=place.bucket, Key=f"d/{number}", Body=b"x" * 10_000)
    place.run("mount", place.manifest, "again", place.directory)
    done = place.run("warm", place.directory, "d")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("5 files, 48.8 KiB are in the cache")
    assert json.loads(place.run("status", "again", "-o", "json").stdout)["cache"]["bytes"] >= 50_000


def test_run_passes_on_the_exit_code_and_uploads(place: Place) -> None:
    body = f"echo hi > {place.directory}/a.txt && ln -s a.txt {place.directory}/latest && exit 7"
    done = place.run("run", "-f", place.manifest, "--mount", f"data={place.directory}", "--", "sh", "-c", body)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert "a.txt" in place.stored()
    assert not place.directory.exists()


@promise("S-192")
@pytest.mark.parametrize("inside", [True, False])
def test_what_a_killed_run_started_ends(place: Place, inside: bool) -> None:
    """The command, which can still save, and the mount, which uploads that. Not inside: for a while before it saves, it
    uses nothing of the mount."""
    directory = "." if inside else place.directory
    late = f"trap 'sleep 3; echo saved > {directory}/late; exit' TERM"
    body = (
        f"{late}; cd {place.directory if inside else '/'}; echo $$ > {directory}/started; while :; do sleep 0.1; done"
    )
    process = place.start("run", "-f", place.manifest, "--mount", f"data={place.directory}", "--", "sh", "-c", body)
    eventually(lambda: content(place.directory / "started").strip())
    pid = int(content(place.directory / "started"))
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    eventually(lambda: not psutil.pid_exists(pid), "the command has ended")
    eventually(lambda: mounted_below(place.directory.parent) == [], "the mount has ended")
    assert {"started", "late"} <= set(place.stored())
    assert place.run("list", "-o", "json").stdout == "[]\n"


@pytest.mark.parametrize("delay_s", [0.0, 0.4, 0.8, 1.2, 1.6, 2.5, None])
def test_ctrl_c_at_any_moment_leaves_no_mount(place: Place, tmp_path: Path, delay_s: float | None) -> None:
    """None: when the command runs, however slow the machine is."""
    mounts = ["--mount", f"data={place.directory}", "--mount", f"again={tmp_path}/two"]
    body = f"touch {place.directory}/started; exec sleep 60"
    process = place.start("run", "-f", place.manifest, *mounts, "--", "sh", "-c", body)
    if delay_s is None:
        eventually(lambda: "started" in place.stored())
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE_S)
    # An interpreter that is interrupted before it runs any program has an exit code of its own.
    begun = delay_s is not None and (process.returncode == -signal.SIGINT or "Fatal Python error: init_" in said[1])
    assert process.returncode == 130 or begun, said
    assert mounted_below(tmp_path) == []
    assert not place.directory.exists()
    assert place.run("list", "-o", "json").stdout == "[]\n"


def test_foreground_ends_with_ctrl_c(place: Place) -> None:
    process = place.start("mount", "--foreground", place.manifest, "data", place.directory)
    eventually(lambda: mounted_below(place.directory.parent))
    eventually(lambda: json.loads(place.run("list", "-o", "json").stdout))
    (place.directory / "a.txt").write_text("hello")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert place.stored() == ["a.txt"]


def test_doctor_finds_nothing_wrong_and_leaves_nothing(place: Place) -> None:
    done = place.run("doctor", place.manifest, "-o", "json")
    found = [each for each in json.loads(done.stdout) if each["check"] in ("data", "again")]
    assert [each for each in found if each["level"] != "ok"] == []
    said = " ".join(each["text"] for each in found if each["check"] == "data")
    assert "clock" in said
    assert "conditional PUTs work" in said
    assert done.returncode == 0
    assert place.stored() == []


def test_doctor_names_what_is_wrong(place: Place) -> None:
    write_manifest(place.manifest, replace(place.server, secret_key="wrong-secret-key"), place.bucket)
    done = place.run("doctor", place.manifest, "data", "-o", "json")
    last = json.loads(done.stdout)[-1]
    assert (done.returncode, last["level"], last["code"]) == (3, "fail", 3)
    assert "check the Secret" in last["todo"]


def test_a_local_directory_is_bound_for_root_and_refused_to_others(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("hello")
    place.manifest.write_text(
        "apiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: here}\n"
        f"spec: {{readOnly: true, local: {{path: {source}}}}}\n"
    )
    done = place.run("mount", place.manifest, "here", place.directory)
    if os.geteuid() != 0:
        line = f"error: Datastore here is the directory {source}; only root can mount it, so use it directly\n"
        assert (done.returncode, done.stderr) == (5, line)
        return
    assert done.returncode == 0
    assert (place.directory / "a.txt").read_text() == "hello"
    with pytest.raises(OSError, match="Read-only file system"):
        (place.directory / "b.txt").write_text("no")
    assert json.loads(place.run("list", "-o", "json").stdout)[0]["location"] == f"local:{source}"
    assert place.run("umount", "here").returncode == 0
    assert not place.directory.exists()
    assert (source / "a.txt").exists()


def test_run_never_hides_a_failed_upload(place: Place) -> None:
    bucket = Path(place.server.data_dir, place.bucket)
    body = f"""
import contextlib, shutil
from tests.patience import eventually
file = open({str(place.directory / "a.txt")!r}, "w")
file.write("precious")
shutil.rmtree({str(bucket)!r})
with contextlib.suppress(OSError):
    file.close()
raise SystemExit("""
    arguments = ("run", "-f", place.manifest, "--mount", f"data={place.directory}", "--", sys.executable, "-c")
    done = place.run(*arguments, body + "0)")
    assert done.returncode == 75
    assert "not everything is uploaded" in done.stderr
    assert not place.directory.exists()
    make_bucket(place.server, place.bucket)
    done = place.run(*arguments, body + "3)")
    assert done.returncode == 3
    assert "not everything is uploaded" in done.stderr
