"""The front door, exit codes, output, doctor's checks, the mount table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore import errors, nfsmount
from datastore.api import crd
from datastore.backends import glusterfs
from datastore.cli import app, hostchecks, mounthelper
from datastore.cli.console import one_line
from datastore.cli.exitcodes import MEANING, ExitCode, exit_code_for
from datastore.cli.findings import Level
from datastore.cli.mounthelper import mount_arguments
from datastore.fuse.nfs import libnfs
from datastore.mounting import kernelnfs, places
from tests.promises import promise

from .conftest import Cli, mounted_by_the_kernel

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
ALL_ERRORS = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.DatastoreError) and each is not errors.DatastoreError
]


def test_every_error_has_an_exit_code_of_its_own_kind() -> None:
    for kind in ALL_ERRORS:
        code = exit_code_for(kind("x"))
        if issubclass(kind, errors.StoreError):
            assert code in (ExitCode.ACCESS, ExitCode.STORAGE), kind
        elif kind is not errors.CacheCorrupt:
            assert code in (ExitCode.USAGE, ExitCode.MOUNT), kind
        assert type(errors.error_named(kind.__name__, "x")) is kind


@pytest.mark.parametrize("name", ["", "Exception", "annotations", "no such"])
def test_an_unknown_kind_of_error_is_the_root_of_the_tree(name: str) -> None:
    assert type(errors.error_named(name, "x")) is errors.DatastoreError


def test_every_exit_code_is_explained_and_documented() -> None:
    assert set(MEANING) == set(ExitCode)
    rows = [f"| {int(code)} | {meaning} |" for code, meaning in MEANING.items()]
    assert "\n".join(["| Code | Meaning |", "|---|---|", *rows]) in REFERENCE.read_text()


def test_every_verb_and_option_is_documented() -> None:
    text = REFERENCE.read_text()
    listed = subprocess.run(
        [sys.executable, "-m", "datastore.cli", "--help"], capture_output=True, text=True, check=True, env=_wide()
    ).stdout
    verbs = [command.name for command in app.app_for([]).registered_commands if not command.hidden]
    for verb in verbs:
        assert f"## datastore {verb}" in text
        assert f" {verb} " in listed


def _wide() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (errors.AccessDenied("no\x1b[31m\nway"), 3, "error: no?[31m way\n"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "error: /x: No such file\n"),
        (OSError("bare"), 1, "error: unexpected OSError; DATASTORE_DEBUG=1 shows where, please report it\n"),
        (
            RuntimeError("AKIAsecret"),
            1,
            "error: unexpected RuntimeError; DATASTORE_DEBUG=1 shows where, please report it\n",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_every_exception_is_reported_in_one_line(
    capfd: pytest.CaptureFixture[str], raised: BaseException, code: int, line: str
) -> None:
    def fails() -> None:
        raise raised

    assert app.exit_code_of(fails) == code
    assert capfd.readouterr() == ("", line)


def test_a_traceback_is_shown_only_on_request(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASTORE_DEBUG", "1")

    def fails() -> None:
        raise errors.MountFailed("no")

    assert app.exit_code_of(fails) == 5
    assert "Traceback" in capfd.readouterr().err


def test_wrong_usage_is_one_line(cli: Cli) -> None:
    assert cli("bogus") == (2, "", "error: No such command 'bogus'. (see --help)\n")
    assert cli("mount").err == "error: Missing argument 'FILE'. (see --help)\n"
    assert cli("umount", "x", "--timeout", "soon").code == 2
    wrong = "error: Invalid value for '--output' / '-o': 'wide' is not one of 'table', 'json'. (see --help)\n"
    assert cli("status", "-o", "wide") == (2, "", wrong)


def test_usage_has_one_pair_of_brackets_around_an_argument(cli: Cli) -> None:
    assert "mount [OPTIONS] {FILE} [NAME] [DIR]" in cli("mount", "--help").out
    for verb in app.VERBS:
        shown = cli(verb, "--help").out
        usage = shown.partition(" [OPTIONS]")[2].splitlines()[0].strip()
        assert not set(usage.split()) & {"{--", "[--"}, verb
        assert "[[" not in usage, verb
        assert usage == usage.upper(), verb
        assert "<bool>" not in shown, "a flag takes no value"


def test_the_list_of_verbs_says_whole_sentences(cli: Cli) -> None:
    for words in ([], ["job"], ["model"]):
        assert "..." not in cli(*words, "--help").out.partition("\nCommands:\n")[2]


def test_a_relative_path_below_a_removed_directory_is_explained(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = cli("umount", "./x")
    assert done.code == ExitCode.MOUNT
    assert done.err.startswith("error: ./x: the current directory can't be used (No such file or directory): cd to ")
    assert cli("list").code == ExitCode.OK


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m datastore.cli crd | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=_wide(), check=True)
    assert done.stdout == crd.text()[:10]
    assert "Traceback" not in done.stderr


def test_crd_and_version_print_data(cli: Cli) -> None:
    assert cli("crd") == (0, crd.text(), "")
    assert cli("version").out == cli("--version").out == f"kube-datastore {version('kube-datastore')}\n"
    assert (cli().code, cli().err) == (2, "")


def test_colour_is_for_terminals_without_no_color() -> None:
    for extra, colours in [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)]:
        done = subprocess.run(
            [sys.executable, "-m", "datastore.cli", "umount", "nothing"],
            capture_output=True,
            text=True,
            env={**_wide(), **extra},
        )
        assert ("\x1b[31m" in done.stderr or "\x1b[1;31m" in done.stderr) is colours


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["umount", "d"], ["digits"]),
        (["mount", "FILE", ""], ["digits", "output"]),
        (["mount", "--read-only", "FILE", "o"], ["output"]),
        (["doctor", "FILE", "d"], ["digits"]),
        (["run", "-f", "FILE", "--mount", "o"], ["output"]),
        (["mount", "/nonexistent", ""], []),
        (["mount", ""], []),
        (["mount", "-", ""], []),
    ],
)
def test_names_are_completed(cli: Cli, manifest: Path, tmp_path: Path, words: list[str], offered: list[str]) -> None:
    """Those of mounts, and those of the Datastores in the file."""
    if words[0] == "umount":
        cli("mount", manifest, "digits", tmp_path / "d")
    line = ["datastore", *(str(manifest) if word == "FILE" else word for word in words)]
    environment = {
        **_wide(),
        "_DATASTORE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(line),
        "COMP_CWORD": str(len(line) - 1),
    }
    program = "import sys; sys.argv[0] = 'datastore'; from datastore.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, input=manifest.read_text()
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")


@promise("S-194")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--uid", "no such"], "--uid must be a name of this machine or a number, not 'no such'"),
        (["--gid", "4294967295"], "--gid must be a name of this machine or a number, not '4294967295'"),
        (["--umask", "9"], "--umask must be octal, as 022, not '9'"),
        (["--umask", "1777"], "--umask must be octal, as 022, not '1777'"),
    ],
)
def test_an_unknown_user_is_refused_as_owner(
    cli: Cli, manifest: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    done = cli("mount", *options, manifest, "digits", tmp_path / "d")
    assert (done.code, words in done.err) == (2, True), done.err


@promise("S-194")
def test_owners_are_chosen_for_buckets_only(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    """A backend that has owners itself is not overruled without a word."""
    manifest.write_text(
        "apiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: here}\nspec: {local: {path: /tmp}}\n"
    )
    done = cli("mount", "--uid", "root", manifest, "here", tmp_path / "d")
    assert (done.code, "--uid, --gid and --umask are for s3; local knows owners" in done.err) == (2, True), done.err


@promise("S-197")
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], []),
        (["rw", "_netdev", "nofail", "x-systemd.automount", "comment=mine", "noatime"], []),
        (["ro", "allow_other"], ["--read-only", "--allow-other"]),
        (["uid=www-data", "gid=33", "umask=027"], ["--uid", "www-data", "--gid", "33", "--umask", "027"]),
        (["metrics=127.0.0.1:0", "memory=1Gi"], ["--metrics", "127.0.0.1:0", "--memory", "1Gi"]),
    ],
)
def test_mount_options_become_those_of_the_command(options: list[str], arguments: list[str]) -> None:
    assert mount_arguments("f", "/d", options) == ["mount", *arguments, "--", "f", "/d"]
    assert mount_arguments("f", "/d", [*options, "name=a"]) == ["mount", *arguments, "--", "f", "a", "/d"]


@promise("S-197")
@pytest.mark.parametrize("option", ["noexec", "suid", "remount", "uid", "uid=", "name=", "ro=1", "credentials=x"])
def test_an_unknown_mount_option_is_refused(option: str) -> None:
    """But for mount -s."""
    with pytest.raises(ValueError, match=f"'{option}' is unknown"):
        mount_arguments("f", "/d", ["ro", option])
    assert mount_arguments("f", "/d", ["ro", option], sloppy=True) == ["mount", "--read-only", "--", "f", "/d"]


@promise("S-197")
@pytest.mark.parametrize("kind", ["nfs", "bind"])
@pytest.mark.parametrize("there", [True, False])
def test_mount_all_can_be_repeated_where_the_kernel_mounts(
    root: Path, tmp_path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch, kind: str, there: bool
) -> None:
    """A record that outlived its mount, as after a reboot, is no mount."""
    place = tmp_path.resolve() / "d"
    mounted_by_the_kernel(root, "output", place, kind)
    (tmp_path / "mountinfo").write_text(f"36 35 8:1 / {place} rw - nfs4 h:/output rw\n" if there else "")
    monkeypatch.setattr("datastore.mountinfo.MOUNTINFO", tmp_path / "mountinfo")
    ran: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        ran.append(arguments)
        return 0

    monkeypatch.setattr(mounthelper, "run", run)
    monkeypatch.setattr(mounthelper, "leave", sys.exit)
    monkeypatch.setattr(sys, "argv", ["mount.datastore", str(manifest), str(place), "-o", "rw,name=output"])
    with pytest.raises(SystemExit) as left:
        mounthelper.mount()
    assert left.value.code == 0
    assert ran == ([] if there else [["mount", "--", str(manifest), "output", str(place)]])


@given(st.text())
def test_one_line_is_one_printable_line(text: str) -> None:
    assert all(letter.isprintable() for letter in one_line(text))


def test_relative_xdg_directories_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert places.state_root() == tmp_path / ".local/state/kube-datastore/mounts"
    assert places.cache_root() == tmp_path / ".cache/kube-datastore/objects"


@pytest.mark.parametrize(
    ("release", "level"),
    [
        ("6.18.44-fc", Level.OK),
        ("6.9.0", Level.OK),
        ("6.8.12", Level.WARN),
        ("5.4.0", Level.WARN),
        ("4.19.1", Level.FAIL),
        ("strange", Level.FAIL),
    ],
)
def test_kernels_are_judged_by_version(release: str, level: Level) -> None:
    assert hostchecks.check_kernel(release).level is level


@pytest.mark.parametrize(
    ("mode", "plain", "level"),
    [(0o666, True, Level.OK), (0o666, False, Level.OK), (0o600, False, Level.WARN), (None, False, Level.FAIL)],
)
def test_the_device_must_be_open_to_plain_users(tmp_path: Path, mode: int | None, plain: bool, level: Level) -> None:
    device = tmp_path / "fuse"
    if mode is not None:
        device.touch()
        device.chmod(mode)
    found = hostchecks.check_device(device, plain=plain)
    assert found.level is level
    assert bool(found.todo) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("mode", "plain", "level"), [(0o4755, True, Level.OK), (0o755, True, Level.FAIL), (0o755, False, Level.WARN)]
)
def test_fusermount3_must_be_setuid(tmp_path: Path, mode: int, plain: bool, level: Level) -> None:
    program = tmp_path / "fusermount3"
    program.touch()
    program.chmod(mode)
    assert hostchecks.check_fusermount(str(program), plain=plain).level is level
    assert hostchecks.check_fusermount(None, plain=plain).level is (Level.FAIL if plain else Level.WARN)


def test_user_allow_other_is_looked_up(tmp_path: Path) -> None:
    config = tmp_path / "fuse.conf"
    assert "for root only" in hostchecks.check_allow_other(config).text
    config.write_text("# user_allow_other\n")
    assert "for root only" in hostchecks.check_allow_other(config).text
    config.write_text("mount_max = 1000\n user_allow_other\n")
    assert "has user_allow_other" in hostchecks.check_allow_other(config).text


def test_the_room_for_the_cache_is_measured(tmp_path: Path) -> None:
    assert hostchecks.check_disk(tmp_path / "not" / "yet", 1).level is Level.OK
    assert hostchecks.check_disk(tmp_path, 1 << 60).level is Level.WARN


def test_doctor_without_a_file_looks_at_this_machine(cli: Cli) -> None:
    done = cli("doctor", "-o", "json")
    checks = [each["check"] for each in json.loads(done.out)]
    assert {"packages", "kernel", "/dev/fuse", "fusermount3", "cache", "mount"} <= set(checks)
    assert cli("doctor").out.startswith("ok    packages: ")


def export_of(tmp_path: Path) -> Path:
    """A manifest of an export of this machine, which has no NFS server."""
    path = tmp_path / "export.yaml"
    kind = "{apiVersion: datastore.dev/v1alpha1, kind: Datastore, metadata: {name: digits}"
    path.write_text(f"{kind}, spec: {{nfs: {{server: 127.0.0.77, path: /a}}}}}}\n")
    return path


@promise("S-270")
@pytest.mark.parametrize("by_kernel", [False, True])
def test_doctor_says_when_no_nfs_server_answers(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: bool
) -> None:
    """Whether the mount would be of our own engine or of the kernel."""
    monkeypatch.setattr(kernelnfs, "is_used", lambda: by_kernel)
    done = cli("doctor", export_of(tmp_path), "-o", "json")
    last = json.loads(done.out)[-1]
    assert (done.code, last["level"], last["code"], done.err) == (4, "fail", 4, "")
    assert "the NFS server 127.0.0.77 " in last["text"]
    assert "spec.nfs" in last["todo"]


@promise("S-270")
@pytest.mark.parametrize(("by_kernel", "level"), [(False, "fail"), (True, "warn")])
def test_doctor_says_when_there_is_nothing_to_ask_an_export_with(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: bool, level: str
) -> None:
    """A mount of our own engine needs it, too; one of the kernel does not."""
    monkeypatch.setattr(kernelnfs, "is_used", lambda: by_kernel)
    monkeypatch.setattr(nfsmount, "reach", lambda location: None)
    monkeypatch.setattr(libnfs, "LIBRARIES", ("libnfs.so.999",))
    libnfs.library.cache_clear()
    done = cli("doctor", export_of(tmp_path), "-o", "json")
    last = json.loads(done.out)[-1]
    assert (last["check"], last["level"]) == ("digits", level)
    assert level == "warn" or done.code == last["code"] == 5
    assert "apt-get install libnfs13" in last["text"]


@promise("S-306")
@pytest.mark.parametrize(("uid", "level"), [(0, "ok"), (1000, "warn")])
def test_doctor_says_that_a_glusterfs_volume_needs_root(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, level: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: name if name == "glusterfs" else which(name, **more))
    monkeypatch.setattr(glusterfs, "find", lambda location: "gfs1")
    path = tmp_path / "volume.yaml"
    kind = "{apiVersion: datastore.dev/v1alpha1, kind: Datastore, metadata: {name: digits}"
    path.write_text(f"{kind}, spec: {{glusterfs: {{servers: [gfs1], volume: v}}}}}}\n")
    last = json.loads(cli("doctor", path, "-o", "json").out)[-1]
    assert (last["check"], last["level"]) == ("digits", level)
    assert "gfs1 serves the volume" in last["text"]
    assert ("sudo" in (last["todo"] or "")) == (uid != 0)


def test_doctor_says_when_nothing_listens(cli: Cli, manifest: Path) -> None:
    done = cli("doctor", manifest, "digits", "-o", "json")
    last = json.loads(done.out)[-1]
    assert (done.code, last["level"], last["code"]) == (4, "fail", 4)
    assert "http://127.0.0.1:9" in last["text"]
    assert "spec.s3.endpoint" in last["todo"]
