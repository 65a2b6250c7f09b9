"""Models as a person uses them: the command, a real bucket, real mounts, and what real frameworks write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from tests.modelstores import plant, tree_of
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server, free_port, make_bucket
from tests.tools.mounting import COMMAND, Client, manifest, unmount_all

pytestmark = [pytest.mark.e2e_laptop, pytest.mark.fuse, pytest.mark.timeout(600)]

TENSORFLOW = """
import sys
import numpy as np
import tensorflow as tf

class Digits(tf.Module):
    def __init__(self):
        self.weights = tf.Variable(np.arange(20, dtype="float32").reshape(4, 5))

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32)])
    def __call__(self, x):
        return {"y": x @ self.weights}

def predict(place):
    serve = tf.saved_model.load(place).signatures["serving_default"]
    print(serve(x=tf.constant([[1.0, 2.0, 3.0, 4.0]]))["y"].numpy().tolist(), flush=True)

tf.saved_model.save(Digits(), sys.argv[1])
predict(sys.argv[1])
predict(input())
"""
"""Saves a model, predicts with it, and predicts again with what is at the path that it is told then."""


SHOWS_FILES = """
import http.server, os
os.chdir(os.environ["DATASTORE_MODEL_PATH"])
assert (os.environ["DATASTORE_MODEL"], os.environ["DATASTORE_MODEL_VERSION"]) == ("digits", "1")
handler = http.server.SimpleHTTPRequestHandler
http.server.test(handler, port=int(os.environ["DATASTORE_PORT"]), bind="127.0.0.1")
"""
"""Serves the files of a version over HTTP until SIGINT."""


LOCAL = """
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: models}}
spec: {{local: {{path: {folder}/kept}}}}
"""


@dataclass
class Laptop:
    """A folder with everything, and a file with two Datastores: `models` in a bucket, and `runs` beside it."""

    folder: Path
    client: Client

    def model(self, *arguments: str | Path) -> str:
        """`datastore model ...`; what it said. Errors: RuntimeError."""
        return self.client.run("model", *arguments, "-f", self.folder / "project.yaml", "--store", "models").stdout


@pytest.fixture
def laptop(versitygw: Server) -> Iterator[Laptop]:
    # A short path: there are Unix sockets below it.
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        documents = []
        for name in ("models", "runs"):
            bucket = make_bucket(versitygw, f"{name}-{uuid.uuid4().hex[:12]}")
            documents.append(manifest(versitygw, bucket, name))
        (folder / "project.yaml").write_text(documents[0] + "---\n" + documents[1].split("---\n")[0])
        try:
            yield Laptop(folder, Client(folder))
        finally:
            unmount_all(folder)


@promise("S-386")
def test_a_version_is_mounted_read_only(laptop: Laptop) -> None:
    """As it was saved, without a download, and nobody changes it there."""
    source = plant(laptop.folder / "source")
    laptop.model("save", "digits", "--from", source)
    place = laptop.folder / "mounted"
    said = laptop.model("mount", "digits:1", place, "--verify")
    try:
        assert said.rstrip().endswith(f"is mounted at {place}, read-only")
        assert tree_of(place) == tree_of(source)
        with pytest.raises(OSError, match="Read-only file system"):
            (place / "new").write_bytes(b"x")
        assert "digits-1" in laptop.client.run("list").stdout
    finally:
        laptop.client.run("umount", place)


@promise("S-415")
def test_a_version_is_served_on_this_machine_until_ctrl_c(laptop: Laptop) -> None:
    """Verified, mounted read-only where the command is told, and nothing is left afterwards."""
    source = plant(laptop.folder / "source")
    laptop.model("save", "digits", "--from", source)
    laptop.model("tag", "digits:1", "prod")
    port, scratch = free_port(), laptop.folder / "tmp"
    scratch.mkdir()
    words = ("digits:prod", "--port", str(port), "-f", str(laptop.folder / "project.yaml"), "--store", "models")
    with (laptop.folder / "serve.log").open("w") as log:
        serving = subprocess.Popen(
            [COMMAND, "serve", *words, "--", sys.executable, "-c", SHOWS_FILES],
            env={**laptop.client.environment, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        names = sorted(each.name for each in source.iterdir() if each.is_file() and not each.is_symlink())
        until = time.monotonic() + 120
        while (found := _fetched(port, names[0])) is None:
            assert serving.poll() is None, (laptop.folder / "serve.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        assert found == (source / names[0]).read_bytes()
        (place,) = scratch.glob("datastore-serve-*/digits/1")
        with pytest.raises(OSError, match="Read-only file system"):
            (place / "new").write_bytes(b"x")
        laptop.model("tag", "digits:1", "prod", "--remove")
        with pytest.raises(RuntimeError, match="is served by datastore serve on"):
            laptop.model("delete", "digits:1")
    finally:
        serving.send_signal(signal.SIGINT)
        code = serving.wait(120)
    said = (laptop.folder / "serve.log").read_text()
    assert code == 0, said
    assert f"has started, for port {port}; Ctrl-C ends it" in said
    assert list(scratch.iterdir()) == []
    assert "digits-1" not in laptop.client.run("list").stdout


@promise("S-415")
@pytest.mark.parametrize("backend", ["s3", "local"] if os.geteuid() == 0 else ["s3"])
def test_what_a_killed_serve_started_ends(laptop: Laptop, backend: str) -> None:
    """The server, and the mount, also one that the kernel makes without a process of ours."""
    file = laptop.folder / "project.yaml"
    if backend == "local":
        (laptop.folder / "kept").mkdir()
        file.write_text(LOCAL.format(folder=laptop.folder))
    laptop.model("save", "digits", "--from", plant(laptop.folder / "source"))
    words = ("digits:1", "--port", str(free_port()), "-f", str(file), "--store", "models")
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [COMMAND, "serve", *words, "--", sys.executable, "-c", program]
    with subprocess.Popen(command, env=laptop.client.environment, stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        pid = int(serving.stdout.readline())
        assert "digits-1" in laptop.client.run("list").stdout
        serving.kill()
    eventually(lambda: not psutil.pid_exists(pid), "the server has ended")
    eventually(lambda: "digits-1" not in laptop.client.run("list").stdout, "the mount has ended")
    assert "digits/1" not in Path("/proc/self/mounts").read_text()


def _fetched(port: int, name: str) -> bytes | None:
    """A file from the server; None while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=60) as answer:
            return bytes(answer.read())
    except OSError:
        return None


@promise("S-372", "S-378")
def test_what_was_written_through_a_mount_is_saved(laptop: Laptop) -> None:
    """Trained into one bucket, saved into another, beside the mount."""
    manifest = laptop.folder / "project.yaml"
    manifest.write_text(manifest.read_text().replace("  s3:", "  writeBack: {maxDelay: 10m}\n  s3:"))
    place = laptop.folder / "runs"
    laptop.client.run("mount", manifest, "runs", place)
    try:
        source = plant(place / "7", longest=225)  # versitygw replaces no file of a longer name (S-34)
        expected = tree_of(source)
        laptop.model("save", "digits", "--from", "runs/7")
    finally:
        laptop.client.run("umount", place)
    laptop.model("export", "digits", laptop.folder / "out")
    assert tree_of(laptop.folder / "out") == expected


def round_trip(laptop: Laptop, source: Path, form: str) -> Path:
    """Save, export in a form, import that again: the digest is the same. The mounted version."""
    target = form if "://" in form else form.replace("out", str(laptop.folder / "out"))
    saved = json.loads(laptop.model("save", "model", "--from", source, "-o", "json", "--progress", "none"))
    laptop.model("export", "model:1", target)
    again = json.loads(laptop.model("import", "copy", target, "-o", "json", "--progress", "none"))
    assert again["digest"] == saved["digest"]
    place = laptop.folder / "mounted"
    laptop.model("mount", "copy", place)
    assert tree_of(place) == tree_of(source)
    return place


@promise("S-378")
def test_a_savedmodel_of_tensorflow_serves_from_the_mount(laptop: Laptop) -> None:
    """With its empty assets/, through an OCI layout and back."""
    pytest.importorskip("tensorflow")
    source = laptop.folder / "saved"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", TENSORFLOW, str(source)]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        predicted = trainer.stdout.readline()
        assert list((source / "assets").iterdir()) == []
        place = round_trip(laptop, source, "oci:out")
        try:
            trainer.stdin.write(f"{place}\n")
            trainer.stdin.close()
            assert trainer.stdout.read() == predicted
            assert predicted.startswith("[[")
        finally:
            trainer.wait()
            laptop.client.run("umount", place)


@promise("S-378", "S-379")
def test_a_snapshot_of_hugging_face(laptop: Laptop) -> None:
    """The cache's directory with its links into blobs, and the snapshot alone, which holds the files."""
    root = laptop.folder / "models--org--digits"
    blob = root / "blobs" / ("a1" * 32)
    snapshot = root / "snapshots" / ("0f" * 20)
    for each in (blob.parent, snapshot, root / "refs"):
        each.mkdir(parents=True)
    (root / "refs" / "main").write_text(snapshot.name)
    weights = {"w": np.arange(1000, dtype=np.float32)}
    save_file(weights, blob)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")

    place = round_trip(laptop, root, "out.tar")
    try:
        found = load_file(place / "snapshots" / snapshot.name / "model.safetensors")
        assert np.array_equal(found["w"], weights["w"])
    finally:
        laptop.client.run("umount", place)

    runs = laptop.folder / "runs"
    laptop.client.run("mount", laptop.folder / "project.yaml", "runs", runs)
    subprocess.run(["cp", "-a", str(root), str(runs)], check=True)
    laptop.client.run("umount", runs)
    laptop.model("save", "snapshot", "--from", f"runs/{root.name}/snapshots/{snapshot.name}")
    laptop.model("export", "snapshot", laptop.folder / "alone")
    assert not (laptop.folder / "alone" / "model.safetensors").is_symlink()
    assert (laptop.folder / "alone" / "model.safetensors").read_bytes() == blob.read_bytes()


@promise("S-378")
def test_a_directory_as_mlflow_logs_it(laptop: Laptop) -> None:
    """MLmodel, environment and data, in the layout that mlflow.pyfunc.save_model makes."""
    root = laptop.folder / "mlflow-model"
    (root / "code" / "empty").mkdir(parents=True)
    (root / "MLmodel").write_text("flavors:\n  python_function:\n    loader_module: mlflow.sklearn\n")
    for name in ("conda.yaml", "python_env.yaml", "requirements.txt", "input_example.json"):
        (root / name).write_text(name)
    (root / "model.pkl").write_bytes(os.urandom(100_000))
    laptop.client.run("umount", round_trip(laptop, root, "datastore://runs/out"))
