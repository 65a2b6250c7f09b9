"""`run`: exit codes, the order of things, and nothing left behind; over the fake mount server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.promises import promise

from .conftest import Cli, asked

CHECKOUT = str(Path(__file__).parents[3])


def script(text: str) -> list[str]:
    return ["--", sys.executable, "-c", text]


@pytest.mark.parametrize("code", [0, 1, 6, 77])
def test_the_exit_code_of_the_command_is_ours(cli: Cli, manifest: Path, tmp_path: Path, code: int) -> None:
    done = cli("run", "-f", manifest, "--mount", f"digits={tmp_path}/d", *script(f"raise SystemExit({code})"))
    assert done == (code, "", "")
    assert not (tmp_path / "d").exists()
    assert cli("list", "-o", "json").out == "[]\n"


@pytest.mark.parametrize(
    ("mounts", "words"),
    [
        ([], "say what to mount: --mount NAME=DIR, once for each Datastore; {manifest} has digits, output"),
        (["digits"], "'digits' is not NAME=DIR"),
        (["=x"], "'=x' is not NAME=DIR"),
        (["digits="], "'digits=' is not NAME=DIR"),
        (["digits=d", "outpux=o"], "{manifest} holds no Datastore 'outpux'; did you mean output?\n"),
        (
            ["digits=d", "output=x/../d"],
            "output can't be mounted at {here}/d, where another --mount of this command is",
        ),
    ],
)
def test_no_command_runs_if_a_mount_fails(
    cli: Cli, manifest: Path, monkeypatch: pytest.MonkeyPatch, mounts: list[str], words: str
) -> None:
    here = manifest.parent
    monkeypatch.chdir(here)
    done = cli("run", "-f", manifest, *(f"--mount={each}" for each in mounts), "--", "touch", "ran")
    assert (done.code, done.out) == (2, "")
    assert words.format(manifest=manifest, here=here) in done.err
    assert list(here.iterdir()) == [manifest]


def test_a_signal_that_ends_the_command_is_told(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    mount = ["--mount", f"digits={tmp_path}/d"]
    assert cli("run", "-f", manifest, *mount, *script("import os; os.kill(os.getpid(), 9)")).code == 137


def test_closed_standard_streams_are_no_error(manifest: Path, tmp_path: Path) -> None:
    """And none of our own files gets their numbers, which the command would write into."""
    look = "import os; open(os.environ['SEEN'], 'w').write(str([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]))"
    driver = [sys.executable, os.fspath(Path(__file__).with_name("driver.py"))]
    arguments = ["run", "-f", os.fspath(manifest), "--mount", f"digits={tmp_path}/d", *script(look)]
    environment = {**os.environ, "FAKE_MODE": "ready", "PYTHONPATH": CHECKOUT, "SEEN": os.fspath(tmp_path / "seen")}
    done = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *driver, *arguments], env=environment, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert (tmp_path / "seen").read_text() == str(["/dev/null"] * 3)


def test_all_mounts_stand_while_the_command_runs(cli: Cli, root: Path, manifest: Path, tmp_path: Path) -> None:
    mounts = ["--mount", f"digits={tmp_path}/d", "-m", f"output={tmp_path}/o"]
    look = f"import pathlib; print(*sorted(p.name for p in pathlib.Path('{tmp_path}').iterdir() if p.is_dir()))"
    assert cli("run", "-f", manifest, *mounts, *script(look)).out.split() == ["cache", "d", "o", "state"]
    for name in ("digits", "output"):
        assert [each["op"] for each in asked(root, name)] == ["stop"]


def test_the_options_of_the_command_are_its_own(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    show = [*script("import sys; print(sys.argv[1:])"), "--mount", "x", "-f"]
    assert cli("run", "-f", manifest, "--mount", f"digits={tmp_path}/d", *show).out == "['--mount', 'x', '-f']\n"


@promise("S-192")
def test_a_directory_that_is_still_used_is_detached_and_reported(
    cli: Cli, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an exit code of its own, when the command succeeded."""
    monkeypatch.setenv("FAKE_MODE", "busy")
    arguments = ["run", "-f", manifest, "--mount", f"output={tmp_path}/d"]
    assert cli(*arguments, *script("raise SystemExit(3)")).code == 3
    done = cli("run", "-f", manifest, "--mount", f"output={tmp_path}/e", *script("pass"))
    assert done.code == 76
    assert done.err == (
        "sh (pid 7) uses it; it was detached, what they still write is uploaded, and the mount ends with them\n"
    )
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("/no/such/program", 127, "/no/such/program: no such command"),
        ("/", 126, "/: can't be executed: Permission denied"),
    ],
)
def test_a_command_that_cannot_run_is_reported(
    cli: Cli, manifest: Path, tmp_path: Path, command: str, code: int, text: str
) -> None:
    done = cli("run", "-f", manifest, "--mount", f"digits={tmp_path}/d", "--", command)
    assert done == (code, "", f"error: {text}\n")
    assert cli("list", "-o", "json").out == "[]\n"


def test_a_failed_mount_unmounts_the_others(cli: Cli, root: Path, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    mounts = ["--mount", f"digits={tmp_path}/d", "--mount", f"output={tmp_path}/full"]
    assert cli("run", "-f", manifest, *mounts, *script("print('ran')")).code == 5
    assert cli("list", "-o", "json").out == "[]\n"
    assert [each["op"] for each in asked(root, "digits")] == ["stop"]


def test_read_only_reaches_the_server(cli: Cli, manifest: Path, tmp_path: Path) -> None:
    listed = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'datastore.cli', 'list', '-o', 'json'])"
    done = cli("run", "-f", manifest, "--read-only", "--mount", f"output={tmp_path}/o", *script(listed))
    assert json.loads(done.out)[0]["readOnly"] is True
