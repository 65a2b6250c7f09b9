"""mount, umount, list, status and warm over the fake mount server."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest

from datastore.api.resolve import state_name
from datastore.errors import MountFailed
from datastore.mountinfo import Mount
from datastore.mounting import launch, lifecycle, mountserver, mounttable, records, unmounting
from tests.promises import promise

from .conftest import Cli, MountOutput, asked, leave_unsent, state_of


@pytest.fixture
def mounted(cli: Cli, manifest: Path, tmp_path: Path) -> Path:
    """Mount `digits`, and return its directory."""
    assert cli("mount", manifest, "digits", tmp_path / "d").code == 0
    return tmp_path / "d"


def test_the_state_is_for_its_owner_only(mounted: Path, root: Path) -> None:
    state_dir = state_of(root, "digits")
    assert stat.S_IMODE(root.stat().st_mode) == stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    for name in ("cli.json", "cli.lock"):
        assert stat.S_IMODE((state_dir / name).stat().st_mode) == 0o600


def test_a_directory_that_was_there_stays(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir()
    assert cli("mount", manifest, "digits", place).code == 0
    assert cli("umount", "digits").code == 0
    assert place.is_dir()


def test_the_directory_is_the_name_unless_given(
    cli: Cli, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("mount", manifest, "output").code == 0
    assert json.loads(cli("list", "-o", "json").out)[0]["mountpoint"] == str(tmp_path / "output")
    assert cli("umount", "./output").code == 0


def test_a_lone_argument_with_a_slash_is_the_directory(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    manifest.write_text(manifest.read_text().split("---", 1)[1].lstrip())
    assert cli("mount", manifest, tmp_path / "x").code == 0
    assert cli("umount", "output").code == 0


def test_several_datastores_need_a_name(cli: Cli, manifest: Path) -> None:
    line = f"error: {manifest} holds several Datastores, name one: digits, output\n"
    assert cli("mount", manifest) == (2, "", line)


def test_a_missing_secret_in_the_file_is_reported(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    manifest.write_text(manifest.read_text().rpartition("---")[0])
    said = cli("mount", manifest, "digits", tmp_path / "d").err
    assert f"{manifest} holds no Secret keys; your own AWS credentials are used for digits\n" in said


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("CredentialsInvalid", 3),
        ("AccessDenied", 3),
        ("ClockSkew", 3),
        ("BucketNotFound", 4),
        ("WrongRegion", 4),
        ("Unreachable", 4),
        ("DeadlineExceeded", 4),
        ("MountFailed", 5),
        ("InvalidManifest", 2),
        ("Nonsense", 1),
    ],
)
def test_what_the_server_reports_is_the_error(
    cli: Cli, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    monkeypatch.setenv("FAKE_MODE", "error")
    monkeypatch.setenv("FAKE_KIND", kind)
    monkeypatch.setenv("FAKE_ERROR", "s3://digits/: the server said\nno")
    assert cli("mount", manifest, "digits", tmp_path / "d") == (
        code,
        "",
        "error: Datastore digits: s3://digits/: the server said no\n",
    )
    assert not (tmp_path / "d").exists()
    assert cli("list", "-o", "json").out == "[]\n"


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("garbage", "the mount server ended without an answer"),
        ("dies", "the mount server ended without an answer: no space left on the moon"),
        ("silent", "the mount server did not answer within 1 s"),
    ],
)
def test_an_unreadable_answer_of_the_server_fails_the_mount(
    cli: Cli, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, text: str
) -> None:
    begun: list[launch.Launched] = []
    take = launch.take
    monkeypatch.setattr(launch, "take", lambda: begun.append(take()) or begun[-1])  # type: ignore[func-returns-value]
    monkeypatch.setenv("FAKE_MODE", mode)
    if mode == "silent":
        monkeypatch.setattr(mountserver, "READY_TIMEOUT_S", 1.0)
        monkeypatch.setattr(mountserver, "STOP_TIMEOUT_S", 0.5)
    assert cli("mount", manifest, "digits", tmp_path / "d") == (5, "", f"error: Datastore digits: {text}\n")
    assert not (tmp_path / "d").exists()
    assert [records.is_server(launched.process.pid) for launched in begun] == [False]


def test_two_commands_never_mount_the_same_at_once(cli: Cli, root: Path, manifest: Path, tmp_path: Path) -> None:
    cli("mount", manifest, "digits", tmp_path / "d")
    cli("umount", "digits")
    with (state_of(root, "digits") / "cli.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cli("mount", manifest, "digits", tmp_path / "d")
    line = "error: another datastore command is mounting the same Datastore there\n"
    assert done == (5, "", line)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("fails", ["record", "mount"])
def test_a_kernel_mount_always_has_a_record(
    cli: Cli, root: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """If the record can't be written, nothing is mounted; if the mount fails, no record is left."""
    place, binds = tmp_path.resolve() / "d", 0
    manifest.write_text(
        "apiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: here}\n"
        f"spec: {{local: {{path: {tmp_path}}}}}\n"
    )

    def bind(source: str, path: str, *, read_only: bool) -> None:
        nonlocal binds
        binds += 1
        assert [each.mountpoint for each in records.all_records()] == [str(place)]
        raise MountFailed("refused")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(mounttable, "bind", bind)
    record = root / state_name("here", str(place), f"local:{tmp_path}") / "mount.json"
    if fails == "record":
        record.mkdir(parents=True)
    done = cli("mount", manifest, "here", place)
    assert (done.code, binds) == ((5, 0) if fails == "record" else (5, 1))
    told = f"{place}: is not mounted, as its record {record} can't be written" if fails == "record" else "refused"
    assert done.err.startswith(f"error: {told}")
    assert not place.exists()
    assert cli("list", "-o", "json").out == "[]\n"


@promise("S-140")
def test_a_serving_mount_that_is_not_in_the_mount_table_is_not_touched(
    cli: Cli, root: Path, mounted: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after `umount -l` with an open file, and in another mount namespace; the fake mounts nothing."""
    monkeypatch.setattr(lifecycle, "ENDING_TIMEOUT_S", 0.05)
    pid = int((state_of(root, "digits") / "fake.pid").read_text())
    done = cli("mount", manifest, "digits", mounted)
    assert done.code == 5
    assert f"error: {mounted}: pid {pid} still serves Datastore digits there" in done.err
    assert records.is_server(pid)
    assert cli("umount", "digits").code == 0


@promise("S-141")
def test_umount_restores_the_directory_when_the_supervisor_is_dead(
    cli: Cli, root: Path, manifest: Path, tmp_path: Path
) -> None:
    place = tmp_path / "d"
    place.mkdir(mode=0o755)
    assert cli("mount", manifest, "digits", place).code == 0
    state_dir = state_of(root, "digits")
    (state_dir / "beneath.json").write_text('{"mode": 493}')
    place.chmod(0o555)
    record = json.loads((state_dir / "mount.json").read_text())
    (state_dir / "mount.json").write_text(json.dumps(record | {"supervisorPid": 0}))
    seen = json.loads(cli("status", "digits", "-o", "json").out)
    assert "its supervisor process has died" in seen["trouble"]
    assert (seen["supervisorPid"], seen["restart"]) == (0, "not possible: no supervisor")
    assert cli("restart", "digits").err.startswith(f"error: {place}: its supervisor process has died")
    assert cli("umount", "digits").code == 0
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    assert not (state_dir / "beneath.json").exists()


@promise("S-142")
@pytest.mark.parametrize(("variable", "what"), [("XDG_STATE_HOME", "state"), ("XDG_CACHE_HOME", "cache")])
def test_a_place_that_cannot_be_made_is_named_with_the_way_out(
    cli: Cli, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, what: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    done = cli("mount", manifest, "digits", tmp_path / "d")
    assert done.code == 5
    assert done.err.startswith(f"error: {tmp_path}/file/kube-datastore/")
    assert f"this directory for the {what} of mounts can't be made: Not a directory" in done.err
    assert variable in done.err
    assert not (tmp_path / "d").exists()


def test_a_large_specification_goes_through_the_pipe(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    bundle = "-----BEGIN CERTIFICATE-----" + "x" * 65_400  # with the rest more than a pipe holds
    manifest.write_text(manifest.read_text().replace("{bucket: digits,", f"{{bucket: digits, caBundle: '{bundle}',"))
    assert cli("mount", manifest, "digits", tmp_path / "d").code == 0


def test_a_directory_that_a_run_may_have_mounted_is_refused(
    cli: Cli, manifest: Path, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmounting it would disturb the program that uses it."""
    there = Mount("0:77", str(mounted), True, "fuse.datastore", "digits")
    with monkeypatch.context() as seen:
        seen.setattr(mounttable, "mounted_at", lambda _: there)
        refused = cli("mount", manifest, "output", mounted)
    assert refused.code == 5
    assert "choose another directory, or, if no `datastore run` or job uses it, end it with" in refused.err


def test_a_mount_point_must_hide_nothing(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cli("mount", manifest, "digits", tmp_path / "file").err == (
        f"error: {tmp_path}/file: can't be a mount point: it is not a directory\n"
    )
    full = cli("mount", manifest, "digits", tmp_path)
    assert full.code == 5
    assert "is not empty, and a mount would hide its files" in full.err


def test_list_shows_what_is_mounted(cli: Cli, mounted: Path) -> None:
    header, row = cli("list").out.splitlines()
    assert header.split() == ["NAME", "MOUNTPOINT", "LOCATION", "MODE", "STATE", "UNSENT", "FAILED"]
    assert row.split() == ["digits", str(mounted), "s3://digits/", "ro", "mounted", "0", "0"]


def test_an_empty_list_says_how_to_begin(cli: Cli) -> None:
    """On standard error: standard output is for programs."""
    none = "no Datastore is mounted; mount one with `datastore mount FILE`\n"
    assert cli("list").err == cli("top", "--once").err == none
    assert cli("list").out.split() == ["NAME", "MOUNTPOINT", "LOCATION", "MODE", "STATE", "UNSENT", "FAILED"]
    assert cli("list", "-o", "json") == (0, "[]\n", "")
    assert cli("job", "list").err.startswith(
        "there is no TrainingJob yet; submit one with `datastore job submit -f FILE`"
    )


def test_status_says_that_nothing_is_mounted(cli: Cli) -> None:
    assert cli("status") == (0, "", "no Datastore is mounted; mount one with `datastore mount FILE`\n")
    assert cli("status", "-o", "json") == (0, "[]\n", "")


def test_status_shows_what_the_server_says(cli: Cli, root: Path, mounted: Path) -> None:
    told = json.loads(cli("status", "digits", "-o", "json").out)
    assert (told["state"], told["cache"], told["dirty"]) == ("mounted", {"bytes": 1536, "limit": 10 << 30}, [])
    short = f"digits\n  mounted at {mounted}, read-only, from s3://digits/\n"
    short += "  via s3: this program's own S3 client\n  cache: 1.5 KiB of 10 GiB\n"
    assert cli("status", mounted).out == short
    text = cli("status", "-v", mounted).out
    assert "  cache: bytes 1.5 KiB, limit 10 GiB\n" in text
    assert "  path: read fast\n" in text
    assert f"  stateDir: {state_of(root, 'digits')}\n" in text
    assert "  unsent: files 0, bytes 0 B, failed 0\n" in text, "without the error that there is not"
    assert len(json.loads(cli("status", "-o", "json").out)) == 1


def test_status_names_the_files_that_failed_to_upload(cli: Cli, mount_output: MountOutput) -> None:
    mount_output("unsynced")
    assert "  not uploaded: 1 file, 2 KiB; 1 failed\n" in cli("status").out
    assert "a/b.txt  2 KiB  1m" in cli("status").out
    assert "403 AccessDenied" in cli("status").out
    assert cli("list").out.splitlines()[1].split()[-2:] == ["1", "1"]


def test_umount_refuses_to_lose_changes(cli: Cli, root: Path, mount_output: MountOutput) -> None:
    place = mount_output("unsynced")
    text = f"{place}: still mounted, because not everything is uploaded: a/b.txt: 403 AccessDenied"
    refused = cli("umount", "output")
    assert refused.code == 6
    assert refused.err.startswith(f"error: {text}; ")
    for way_out in ("unsent --retry", "--save", "umount --force"):
        assert way_out in refused.err
    leave_unsent(state_of(root, "output"), "a/b.txt")
    text = f"{place}: unmounted, but not everything is uploaded; it is kept on disk: a/b.txt: 403 AccessDenied"
    forced = cli("umount", "--force", "output")
    assert forced.code == 6
    assert forced.err.startswith(f"error: {text}; mount it there again to upload it")
    assert "unsent --save" in forced.err
    assert not place.exists()
    assert cli("list").out.splitlines()[1].split()[-4:] == ["not", "mounted", "1", "0"]


def test_a_permanent_upload_failure_is_not_reported_as_retried(
    cli: Cli, root: Path, mount_output: MountOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client has written the file meanwhile (S-47)."""
    monkeypatch.setenv("FAKE_STUCK", "1")
    place = mount_output("unsynced")
    refused = cli("umount", "output")
    leave_unsent(state_of(root, "output"), "a/b.txt", stuck=True)
    forced = cli("umount", "--force", "output")
    for done in (refused, forced):
        assert done.code == 6
        assert f"`datastore unsent --save DIR {place}` copies it elsewhere, `--discard FILE`" in done.err
        assert "--retry" not in done.err
        assert "mount it" not in done.err
    assert f"`datastore umount --force {place}` unmounts" in refused.err


def test_umount_of_a_busy_directory_says_who_uses_it(cli: Cli, mount_output: MountOutput) -> None:
    place = mount_output("busy")
    assert cli("umount", "output") == (5, "", f"error: {place}: sh (pid 7) uses it\n")
    assert cli("umount", "output", "--force").code == 0


def test_umount_all_unmounts_each_and_reports_each_failure(
    cli: Cli, manifest: Path, tmp_path: Path, mount_output: MountOutput
) -> None:
    assert cli("mount", manifest, "digits", tmp_path / "e").code == 0
    place = mount_output("busy")
    done = cli("umount", "--all")
    assert done.code == 5
    assert f"digits is unmounted from {tmp_path}/e\n" in done.err
    assert f"error: {place}: sh (pid 7) uses it\n" in done.err
    assert cli("umount", "--all", "--force").code == 0
    assert cli("list", "-o", "json").out == "[]\n"
    assert cli("umount", "--all").code == 0


def test_umount_all_unmounts_nested_mounts_first(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    """The outer mount would be busy otherwise; a third mount whose path sorts between the two changes nothing."""
    places = [tmp_path / "d", tmp_path / "d" / "below", tmp_path / "d-beside"]
    for place in places:
        assert cli("mount", manifest, "digits", place).code == 0
    told = cli("umount", "--all").err.splitlines()
    assert sorted(told) == [f"digits is unmounted from {place}" for place in sorted(places, key=str)]
    assert told.index(f"digits is unmounted from {places[1]}") < told.index(f"digits is unmounted from {places[0]}")


@pytest.mark.parametrize("arguments", [(), ("digits", "--all")])
def test_umount_takes_one_mount_or_all(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli("umount", *arguments)
    assert done.code == 2
    assert "name one mount, or all with --all" in done.err


def test_mount_replaces_what_is_there_when_asked(cli: Cli, mounted: Path, root: Path, manifest: Path) -> None:
    assert cli("mount", "--replace", manifest, "output", mounted).code == 0
    assert [each["op"] for each in asked(root, "digits")] == ["stop"]
    assert [each["name"] for each in json.loads(cli("list", "-o", "json").out)] == ["output"]
    assert cli("mount", "--replace", manifest, "output", mounted.parent / "free").code == 0, "nothing to replace"


def test_the_state_directories_of_old_mounts_are_removed(
    cli: Cli, root: Path, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the last mounts stay, those of present mounts, and one with bytes that are not uploaded."""
    monkeypatch.setattr(lifecycle, "ENDED_MAX", 2)
    states = list[Path]()
    for number in range(6):
        before = set(root.iterdir()) if root.exists() else set[Path]()
        assert cli("mount", manifest, "digits", tmp_path / str(number)).code == 0
        (state,) = set(root.iterdir()) - before
        os.utime(state, (number, number))
        states.append(state)
        if number == 0:
            leave_unsent(state, "kept")
        if number != 1:
            assert cli("umount", tmp_path / str(number)).code == 0
            os.utime(state, (number, number))
    assert cli("mount", manifest, "digits", tmp_path / "last").code == 0
    assert [state.exists() for state in states] == [True, True, False, False, True, True]


def test_a_server_that_hangs_is_ended_by_force_only(
    cli: Cli, mount_output: MountOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unmounting, "FORCE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("datastore.controlclient.STATUS_TIMEOUT_S", 0.2)
    mount_output("mute")
    hanging = cli("umount", "output", "--timeout", "200ms")
    assert hanging.code == 1
    assert "`datastore umount --force` ends it anyway" in hanging.err
    assert json.loads(cli("list", "-o", "json").out)[0]["state"] == "not answering"
    assert cli("umount", "output", "--force").code == 0
    assert cli("list", "-o", "json").out == "[]\n"


@promise("S-196")
@pytest.mark.parametrize(
    ("storage", "why"),
    [
        (
            {"since": 0, "lastAsked": 1e12, "error": "GET x: connection refused"},
            r"storage has not answered since 1970-.*: GET x: connection refused",
        ),
        ({}, "the uploads have not ended in time"),
    ],
)
def test_an_unmount_that_takes_too_long_names_the_storage(
    cli: Cli, mount_output: MountOutput, storage: dict[str, object], why: str
) -> None:
    """The error does not blame the mount server, which answers all other requests."""
    place = mount_output("stalled", storage)
    done = cli("umount", "output", "--timeout", "200ms")
    assert done.code == 6
    assert re.match(
        f"error: {place}: still mounted, because not everything is uploaded: {why}; `datastore unsent", done.err
    )
    assert cli("umount", "output", "--force").code == 0


def test_a_directory_that_is_taken_for_a_name_is_told_how_to_write(cli: Cli, manifest: Path) -> None:
    """The hint is given only where the argument may be a name."""
    assert "it holds digits, output; if this is the directory, write ./photos" in cli("mount", manifest, "photos").err
    assert "write ./" not in cli("mount", manifest, "photos", "./place").err


@promise("S-261")
def test_data_that_is_only_in_memory_is_not_reported_as_on_disk(
    cli: Cli, mount_output: MountOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS, a forced unmount loses it, which is reported before and afterwards."""
    monkeypatch.setattr(unmounting, "FORCE_TIMEOUT_S", 0.2)
    place = mount_output("held", {"since": 0, "lastAsked": 1e12, "error": "h can't be reached"})
    listed = cli("unsent", "output")
    assert "nothing of output is kept on disk" in listed.err
    assert "2 KiB of a/b.txt: storage has not answered" in listed.err
    refused = cli("umount", "output", "--timeout", "200ms")
    assert refused.code == 6
    assert "the server has not stored all that programs wrote" in refused.err
    assert f"`datastore umount --force {place}` unmounts, and loses it" in refused.err
    assert "disk" not in refused.err
    forced = cli("umount", "--force", "output")
    assert forced.code == 6
    assert "that is lost: 2 KiB of a/b.txt: storage has not answered" in forced.err
    assert cli("list", "-o", "json").out == "[]\n"


@promise("S-261")
def test_a_forced_unmount_reports_data_that_the_server_refused_as_lost(cli: Cli, mount_output: MountOutput) -> None:
    """The server answers, so there is no wait."""
    mount_output("refused")
    assert "2 KiB of a/b.txt: 403 AccessDenied" in cli("unsent", "output").err
    refused = cli("umount", "output")
    assert refused.code == 6
    assert "all that programs wrote: a/b.txt: 403 AccessDenied; repeat it when the server can store it" in refused.err
    forced = cli("umount", "--force", "output")
    assert forced.code == 6
    assert "that is lost: 2 KiB: a/b.txt: 403 AccessDenied" in forced.err
    assert cli("list", "-o", "json").out == "[]\n"


@promise("S-196")
def test_an_unmount_that_only_waits_for_requests_says_that_it_is_unmounted(cli: Cli, mount_output: MountOutput) -> None:
    """The storage is silent, and there is nothing to upload."""
    place = mount_output("ending", {"since": 0, "lastAsked": 1e12, "error": "the SSH server h can't be reached"})
    done = cli("umount", "output", "--timeout", "200ms")
    assert done.code != 0
    assert re.match(
        f"error: {place}: unmounted, but requests still run: storage has not answered since 1970-.*: the SSH"
        " server h can't be reached; the mount's processes end with them, or at once by `datastore umount --force`",
        done.err,
    )
    assert cli("umount", "output", "--force").code == 0


def test_a_crashed_mount_is_listed_with_what_it_had_not_uploaded(
    cli: Cli, root: Path, manifest: Path, mount_output: MountOutput
) -> None:
    place = mount_output("ready")
    state_dir = state_of(root, "output")
    leave_unsent(state_dir, "a.txt", "b.txt")
    pid = int((state_dir / "fake.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (told,) = json.loads(cli("status", "-o", "json").out)
    assert told["state"] == "not mounted"
    assert [(each["path"], each["bytes"], each["error"]) for each in told["dirty"]] == [
        ("a.txt", 1024, None),
        ("b.txt", 1024, "403 AccessDenied"),
    ]
    assert "output at" in cli("doctor").out
    crashed = f"{place}: the mount has crashed; `datastore umount` removes it, `datastore mount` mounts it again"
    assert cli("warm", "output") == (1, "", f"error: {crashed}\n")
    ended = cli("umount", "output")
    assert ended.code == 6
    assert "not uploaded: 2 changed files; kept on disk" in ended.err
    assert cli("list").out.splitlines()[1].split()[-4:] == ["not", "mounted", "2", "1"]
    assert cli("warm", "output").err.startswith(f"error: {place}: is not mounted; mount it there again")
    # The next mount at the same place finds the same state directory.
    assert cli("mount", manifest, "output", place).code == 0
    assert list(root.iterdir()) == [state_dir]


@pytest.mark.parametrize("verb", ["umount", "status", "warm"])
def test_what_is_not_mounted_is_said_with_what_is(cli: Cli, mounted: Path, verb: str) -> None:
    line = f"error: other: no Datastore is mounted there or has this name; `datastore list` shows digits at {mounted}\n"
    assert cli(verb, "other") == (1, "", line)


def test_a_name_that_is_mounted_twice_needs_the_directory(
    cli: Cli, mounted: Path, manifest: Path, tmp_path: Path
) -> None:
    assert cli("mount", manifest, "digits", tmp_path / "e").code == 0
    assert cli("umount", "digits").err == (
        f"error: digits is mounted more than once, name the directory: {mounted}, {tmp_path}/e\n"
    )
    assert cli("umount", tmp_path / "e").code == 0


@pytest.mark.parametrize(("path", "sent"), [("", ""), ("a/b", "a/b"), (".", ""), ("a/../b", "b")])
def test_warm_asks_for_a_path_within_the_mount(cli: Cli, root: Path, mounted: Path, path: str, sent: str) -> None:
    done = cli("warm", mounted, path)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("3 files, 3 KiB are in the cache")
    assert asked(root, "digits") == [{"op": "warm", "path": sent}]


def test_warm_takes_a_directory_inside_the_mount(cli: Cli, root: Path, mounted: Path) -> None:
    assert cli("warm", mounted / "a", "b").code == 0
    assert cli("warm", mounted, mounted / "c").code == 0
    assert [each["path"] for each in asked(root, "digits")] == ["a/b", "c"]


def test_warm_refuses_to_leave_the_mount(cli: Cli, mounted: Path) -> None:
    assert cli("warm", mounted, "../x") == (1, "", f"error: ../x is not inside {mounted}\n")


def test_warm_reports_what_it_could_not_fetch(cli: Cli, mount_output: MountOutput) -> None:
    mount_output("unsynced")
    line = "error: not everything is in the cache: a.txt: 403 AccessDenied (and 1 more)\n"
    assert cli("warm", "output") == (1, "", line)


def test_broken_records_break_nothing(cli: Cli, root: Path, mounted: Path) -> None:
    for name, content in [("a", "{"), ("b", "[]"), ("c", '{"name": 1}'), ("d", '{"spec": 5}'), ("e", "\xff")]:
        (root / name).mkdir()
        (root / name / "mount.json").write_bytes(content.encode("latin-1"))
    (root / "file").write_text("")
    assert len(json.loads(cli("list", "-o", "json").out)) == 1


@promise("S-261")
def test_what_a_server_had_in_memory_when_it_ended_at_a_forced_unmount_is_reported_as_lost(
    cli: Cli, mount_output: MountOutput
) -> None:
    """Nobody can be asked for it any more when the unmount finds that there is no answer."""
    mount_output("vanishes")
    forced = cli("umount", "--force", "output")
    assert forced.code == 6
    assert "that is lost: 2 KiB of a/b.txt: 403 AccessDenied" in forced.err
    assert cli("list", "-o", "json").out == "[]\n"
