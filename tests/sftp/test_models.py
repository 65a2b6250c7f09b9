"""Models in directories of an SSH server: two mounts of one, as from two machines, at once; and all by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from datastore.errors import AlreadyExists
from datastore.models.directory import DirectoryStorage
from datastore.models.progress import Progress
from datastore.models.verifying import verify
from tests.contract.test_model_storage import INCREMENT
from tests.modelstores import Home, plant, tree_of
from tests.promises import promise
from tests.sftp.mounts import documents, mounted
from tests.sftp.sshd import SSHServer
from tests.tools.mounting import Client

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1800)]
LIMIT_S = 400.0


@promise("S-373", "S-380")
def test_saves_and_aliases_from_two_mounts_at_once(sshd: SSHServer, clean_environment: Path) -> None:
    """Twenty saves get twenty numbers and forty increments are forty."""
    served = clean_environment / "models-served"
    for each in ("models", "m"):
        (served / each).mkdir(parents=True)
    (served / "m" / "counter").write_bytes(b"0")
    with mounted(sshd, served, clean_environment) as one, mounted(sshd, served, clean_environment) as two:
        roots = [str(each.path) for each in (one, two)]
        savers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.savers", roots[number % 2], "5", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(4)
        ]
        said = [each.communicate("go\n", timeout=LIMIT_S)[0] for each in savers]
        assert [each.returncode for each in savers] == [0] * 4
        counters = [subprocess.Popen([sys.executable, "-c", INCREMENT, root]) for root in roots]
        assert [each.wait(LIMIT_S) for each in counters] == [0, 0]
    assert sorted(int(number) for each in said for number in each.split()) == list(range(1, 21))
    assert (served / "m" / "counter").read_bytes() == b"40"
    models = Home("directory", root=served).models()
    assert [each.version for each in models.versions("digits")] == list(range(20, 0, -1))
    assert verify(models, "digits", 20, Progress())[1] == []


@promise("S-373", "S-380")
def test_a_document_is_created_once_whatever_a_mount_believes(sshd: SSHServer, clean_environment: Path) -> None:
    """For a second after a look, a mount answers from memory that a name is free."""
    served = clean_environment / "created-once"
    served.mkdir()
    with mounted(sshd, served, clean_environment) as one, mounted(sshd, served, clean_environment) as two:
        for number in range(5):
            path = f"{number}/document"
            (one.path / str(number)).mkdir()
            assert not (one.path / path).exists()
            DirectoryStorage(two.path).create(path, b"first")
            with pytest.raises(AlreadyExists):
                DirectoryStorage(one.path).create(path, b"second")
            assert (served / path).read_bytes() == b"first"
            assert os.listdir(served / str(number)) == ["document"]


@promise("S-370", "S-384")
def test_the_command_saves_from_and_exports_to_directories_of_a_server(
    sshd: SSHServer, clean_environment: Path
) -> None:
    """To a new directory, an empty one, and all of a Datastore. People are told where the data is, and not where the
    command mounted it for the moment."""
    folder = clean_environment / "by-command"
    files = {name: folder / name for name in ("models", "runs", "out")}
    for each in files.values():
        each.mkdir(parents=True)
    source = plant(files["runs"] / "7")
    (files["out"] / "empty").mkdir()
    parts = []
    for name, path in files.items():
        sftp = {"host": "127.0.0.1", "port": sshd.port, "path": str(path), "knownHosts": sshd.known_hosts}
        said = documents({**sftp, "credentialsSecret": "login"}, sshd.user, sshd.private_key)
        datastore, secret = yaml.safe_load_all(said)
        parts.append({**datastore, "metadata": {"name": name}})
    (folder / "project.yaml").write_text(yaml.safe_dump_all([*parts, secret]))

    def model(*words: str) -> subprocess.CompletedProcess[str]:
        return Client(folder).command("model", *words, "-f", folder / "project.yaml")

    where = f"sftp://127.0.0.1:{sshd.port}{folder}"
    saved = model("save", "digits", "--from", "runs/7", "-o", "json")
    assert json.loads(saved.stdout)["lineage"]["location"] == f"{where}/runs/7", saved.stderr
    for target in ("new", "empty"):
        assert model("export", "digits", f"datastore://out/{target}").returncode == 0
        assert tree_of(files["out"] / target) == tree_of(source)
    assert f"{where}/out/empty: is there already" in model("export", "digits", "datastore://out").stderr
    for target in ("new", "empty"):
        subprocess.run(["rm", "-r", files["out"] / target], check=True)
    assert model("export", "digits", "datastore://out").returncode == 0
    assert tree_of(files["out"]) == tree_of(source)
    (files["models"] / "digits/1/run.sh").write_bytes(b"another size")
    assert f"error: {where}/models/digits/1/run.sh: has 12 bytes now" in model("verify", "digits").stderr
