"""The README's commands do what it says: its manifest against a real server, its console blocks in one shell each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server, boto_client, free_port

README = Path(__file__).resolve().parents[2] / "README.md"
ENDPOINT = "http://127.0.0.1:9000"
TIMEOUT_S = 240.0

pytestmark = [pytest.mark.fuse, pytest.mark.e2e_laptop, pytest.mark.plain_user, pytest.mark.timeout(600)]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def _run_console(block: str, folder: Path) -> str:
    """Run the lines that begin with `$ `; the first that fails ends it. What was printed."""
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-x", "-c", "\n".join(commands)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_readme_s_commands_work(versitygw: Server, tmp_path: Path) -> None:
    (manifest,) = _blocks("yaml")
    for placeholder, real in (
        (ENDPOINT, versitygw.endpoint),
        ("KEY_ID: access", f"KEY_ID: {versitygw.access_key}"),
        ("ACCESS_KEY: secret", f"ACCESS_KEY: {versitygw.secret_key}"),
    ):
        assert placeholder in manifest
        manifest = manifest.replace(placeholder, real)
    (tmp_path / "datastore.yaml").write_text(manifest)

    mount_block, run_block, _ = (block.replace("/tmp/photos", str(tmp_path / "run")) for block in _blocks("console"))
    assert "\nfirst\nsecond\n" in _run_console(mount_block, tmp_path)

    client = boto_client(versitygw)
    keys = {found["Key"] for found in client.list_objects_v2(Bucket="photos")["Contents"]}
    assert {"archive/notes.txt", "archive/empty/"} <= keys
    assert client.get_object(Bucket="photos", Key="archive/notes.txt")["Body"].read() == b"first\nsecond\n"
    assert any(key.startswith("latest") for key in keys)

    printed = _run_console(run_block, tmp_path)
    for name in ("archive", "empty", "notes.txt", "latest"):
        assert name in printed


def test_the_readme_s_training_runs(tmp_path: Path) -> None:
    """Its commands, with a copy of the examples that has a free port in place of 9000."""
    examples, port = tmp_path / "examples", str(free_port())
    shutil.copytree(README.parent / "examples", examples)
    for each in (examples / "put_digits.py", examples / "none" / "job.yaml"):
        each.write_text(each.read_text().replace(ENDPOINT, f"http://127.0.0.1:{port}"))
    *_, block = _blocks("console")
    assert "moto_server -p 9000" in block
    printed = _run_console("$ trap 'kill %1' EXIT\n" + block.replace("9000", port), tmp_path)
    assert "accuracy 0." in printed
    assert "digits: Succeeded" in printed


def test_what_the_readme_says_to_make_can_be_made() -> None:
    (block,) = _blocks("sh")
    targets = re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert ". .venv/bin/activate" in block  # made by `make demo`, as the Makefile has it
    makefile = (README.parent / "Makefile").read_text()
    assert re.search(r"^demo: setup ", makefile, re.MULTILINE)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("document", ["README.md", "docs/OPERATIONS.md"])
def test_every_verb_that_is_named_exists(document: str) -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "datastore.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    verbs = set(re.findall(r"(?:`|\$ |kubectl )datastore ([a-z-]+)", (README.parent / document).read_text()))
    assert verbs
    assert {verb for verb in verbs if not re.search(rf"^\W*{verb} ", help_text, re.MULTILINE)} == set()


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
