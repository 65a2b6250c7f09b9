"""The examples of an export that is built into a Go program and into a Java program, with ONNX Runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.promises import promise
from tests.tools.mounting import COMMAND

pytestmark = [pytest.mark.e2e_laptop, pytest.mark.timeout(1200)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "embedded"
LIMIT_S = 600
STORE = """
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: models}}
spec: {{local: {{path: {place}}}}}
"""


@promise("S-417")
def test_a_go_and_a_java_program_hold_an_exported_version(tmp_path: Path) -> None:
    """Trained, saved, exported into the sources, built, and each is right as often as it was in training."""
    packages = tmp_path / "packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--target",
        str(packages),
    ]
    run(tmp_path, *pip, "--requirement", str(EXAMPLE / "requirements.txt"))
    environment = {"PYTHONPATH": str(packages), "DATASTORE_FILE": str(tmp_path / "store.yaml")}
    trained = run(tmp_path, sys.executable, str(EXAMPLE / "train.py"), "run", **environment)
    assert trained.endswith("digits are right\n")
    right = f"{float(trained.split()[0]) * 100:.0f} of 100 digits are right\n"
    (tmp_path / "store").mkdir()
    (tmp_path / "store.yaml").write_text(STORE.format(place=tmp_path / "store"))
    run(tmp_path, COMMAND, "model", "save", "digits", "--from", "./run", **environment)
    go, java = (tmp_path / name for name in ("go", "java"))
    for program, place in ((go, "model"), (java, "src/main/resources")):
        shutil.copytree(EXAMPLE / program.name, program)
        run(program, COMMAND, "model", "export", "digits:1", place, **environment)
    library = next((packages / "onnxruntime" / "capi").glob("libonnxruntime.so*"))

    def in_go() -> str:
        run(go, "go", "build", "-mod=readonly", "-o", "digits", ".")
        return run(go, str(go / "digits"), ONNXRUNTIME_LIBRARY=str(library))

    def in_java() -> str:
        run(java, "mvn", "--batch-mode", "--quiet", "package", "dependency:copy-dependencies")
        return run(java, "java", "-cp", "target/digits-1.jar:target/dependency/*", "Digits")

    with ThreadPoolExecutor(2) as both:
        answers = [both.submit(program) for program in (in_go, in_java)]
        assert [answer.result() for answer in answers] == [right] * 2


def run(folder: Path, *command: str, **environment: str) -> str:
    """What a command prints, which has to succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[:3]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
