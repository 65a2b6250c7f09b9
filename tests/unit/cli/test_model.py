"""`datastore model ...` over a store in a directory: a laptop without a cluster and without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from datastore.models.directory import DirectoryStorage
from datastore.models.registry import Models
from tests.modelstores import plant, tree_of
from tests.patience import PATIENCE_S
from tests.promises import promise

from .conftest import Cli, asked

MANIFEST = """
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: models}}
spec: {{local: {{path: {root}/models}}}}
---
apiVersion: datastore.dev/v1alpha1
kind: Datastore
metadata: {{name: runs}}
spec: {{local: {{path: {root}/runs}}}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the person is: two Datastores in p.yaml, which the environment names, and a run."""
    (tmp_path / "p.yaml").write_text(MANIFEST.format(root=tmp_path))
    (tmp_path / "models").mkdir()
    plant(tmp_path / "runs" / "7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATASTORE_FILE", "p.yaml")
    return tmp_path


def digest_of(here: Path) -> str:
    return Models(DirectoryStorage(here / "models")).head("digits", 1).digest


@promise("S-370")
def test_a_model_is_saved_listed_shown_and_exported(here: Path, cli: Cli) -> None:
    code, out, err = cli("model", "save", "digits", "--from", "runs/7", "--label", "stage=test")
    digest = digest_of(here)
    assert (code, out, err) == (0, "", f"digits:1 is saved: 6 files, 10.7 KiB, {digest}\n")
    again = cli("model", "save", "digits", "--from", "./runs/7")
    assert again.code == 0
    assert "digits:1 holds the same bytes already, so no version was made" in again.err

    assert cli("model", "tag", "digits:1", "prod").err == "digits:prod means version 1\n"
    head, row = cli("model", "list").out.splitlines()
    assert head.split() == ["MODEL", "NEWEST", "ALIASES", "FILES", "SIZE", "SAVED", "DIGEST"]
    assert row.split()[:5] == ["digits", "1", "prod=1", "6", "10.7"]
    shown = json.loads(cli("model", "show", "digits:prod", "--files", "-o", "json").out)
    assert (shown["digest"], shown["labels"], shown["aliases"]) == (digest, {"stage": "test"}, ["prod"])
    assert shown["lineage"]["datastore"] == "runs"
    assert len(shown["entries"]) == 11
    assert f"digest:             {digest}\n" in cli("model", "show", "digits").out

    assert cli("model", "export", "digits:prod", "out").code == 0
    assert tree_of(here / "out") == tree_of(here / "runs" / "7")
    assert cli("model", "export", "digits", "datastore://runs/copy").code == 0
    assert tree_of(here / "runs" / "copy") == tree_of(here / "runs" / "7")


@promise("S-379")
def test_a_read_only_datastore_is_read_and_never_written(here: Path, cli: Cli) -> None:
    assert cli("model", "save", "digits", "--from", "runs/7").code == 0
    text = (here / "p.yaml").read_text()
    (here / "p.yaml").write_text(text.replace("spec: {", "spec: {readOnly: true, "))
    before = tree_of(here / "models"), tree_of(here / "runs")
    assert cli("model", "list").code == cli("model", "verify", "digits").code == cli("model", "gc").code == 0
    assert cli("model", "export", "digits", "out").code == 0
    for verb in (
        ("save", "digits", "--from", "./out", "--force"),
        ("import", "other", "./out"),
        ("tag", "digits:1", "prod"),
        ("delete", "digits:1"),
        ("gc", "--delete"),
    ):
        refused = cli("model", *verb)
        assert (refused.code, refused.out) == (2, "")
        assert "Datastore models: spec.readOnly is true, so nothing is written there" in refused.err
    refused = cli("model", "export", "digits", "datastore://runs/copy")
    assert "Datastore runs: spec.readOnly is true, so nothing is written there" in refused.err
    assert (tree_of(here / "models"), tree_of(here / "runs")) == before


@promise("S-378", "S-385")
@pytest.mark.parametrize("form", ["out", "out.tar", "oci:out", "datastore://runs/out"])
def test_every_export_can_be_imported(here: Path, cli: Cli, form: str) -> None:
    cli("model", "save", "digits", "--from", "runs/7")
    assert cli("model", "export", "digits", form).code == 0
    done = cli("model", "import", "copy", form, "-o", "json")
    assert json.loads(done.out)["digest"] == digest_of(here)
    refused = cli("model", "export", "digits", form)
    if not form.startswith("datastore:"):
        assert refused.code == 2
        assert "is there already" in refused.err
    cli("model", "save", "digits", "--from", "runs", "--force")
    refused = cli("model", "export", "digits", form)
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "is there" in refused.err


@promise("S-383")
def test_a_damaged_version_is_refused_with_the_path_and_both_digests(here: Path, cli: Cli) -> None:
    cli("model", "save", "digits", "--from", "runs/7")
    assert "digits:1 is as it was saved: 6 files" in cli("model", "verify", "digits").err
    file = here / "models/digits/1/variables/data"
    file.write_bytes(b"\1" + file.read_bytes()[1:])

    for arguments in (("verify", "digits"), ("export", "digits", "out"), ("mount", "digits", "m", "--verify")):
        code, out, err = cli("model", *arguments)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert "digits/1/variables/data: was saved with sha256 " in err
        assert "and has " in err
    assert not (here / "out").exists()
    assert not (here / "m").exists()


@promise("S-383")
def test_damaged_versions_are_marked_and_all_others_are_listed(here: Path, cli: Cli) -> None:
    """The newest version of a model, and an alias; then each is mended as the line says."""
    for name in ("digits", "digits", "other"):
        assert cli("model", "save", name, "--from", "runs/7", "--force").code == 0
    cli("model", "tag", "digits:1", "prod")
    (here / "models/digits/2.json").write_bytes(b"junk")
    (here / "models/digits/aliases/bad").write_bytes(b"junk")
    way_out = "digits/2.json: is not a manifest of a version; delete the version, or bring this file back from a copy\n"

    code, out, err = cli("model", "list")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert (code, rows[0]) == (0, ["digits", "2", "bad=damaged,", "prod=1", "-", "-", "-", "damaged"])
    assert rows[1][:2] == ["other", "1"]
    assert "the alias bad of digits is damaged: it holds no number; move it" in err
    assert err.endswith(way_out)

    code, out, err = cli("model", "list", "digits")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert (code, rows[0], rows[1][:3]) == (0, ["2", "-", "-", "-", "-", "damaged"], ["1", "prod", "6"])
    assert err.endswith(way_out)
    [damaged, _] = json.loads(cli("model", "list", "digits", "-o", "json").out)
    assert (damaged["version"], damaged["digest"]) == (2, "")
    assert "2.json: is not a manifest" in damaged["damage"]
    for verb in ("show", "verify"):
        refused = cli("model", verb, "digits:2")
        assert (refused.code, refused.out) == (1, "")
        assert refused.err.endswith(way_out)
    assert cli("model", "show", "digits:1").code == 0

    assert cli("model", "gc").err == "nothing to remove\n"
    assert cli("model", "delete", "digits:2").code == 1
    assert cli("model", "tag", "digits", "bad", "--remove").code == 0
    assert cli("model", "delete", "digits:2").code == 0
    assert cli("model", "list").err == ""


@promise("S-380", "S-381", "S-382")
def test_diff_tag_delete_and_gc_work_together(here: Path, cli: Cli) -> None:
    cli("model", "save", "digits", "--from", "runs/7")
    (here / "runs/7/new").write_bytes(b"12345")
    cli("model", "save", "digits", "--from", "runs/7")
    assert cli("model", "diff", "digits:1", "2").out == "+ new 5 B\n"
    assert cli("model", "diff", "digits:1", "1").err == "digits:1 and digits:1 hold the same\n"

    assert cli("model", "tag", "digits:2", "prod", "--expect", "1").code == 1
    cli("model", "tag", "digits:2", "prod", "--expect", "0")
    assert cli("model", "tag", "digits:1", "prod").err == "digits:prod means version 1 (it was 2)\n"
    refused = cli("model", "delete", "digits:1")
    assert (refused.code, refused.err) == (
        1,
        "error: digits:1 is not deleted: the alias prod means it; move or remove that first\n",
    )
    assert cli("model", "delete", "digits:prod").code == 2
    assert cli("model", "tag", "digits", "prod", "--remove").code == 0
    assert cli("model", "delete", "digits:1").code == 0
    assert not (here / "models/digits/1").exists()
    assert cli("model", "gc").err == "nothing to remove\n"

    Models(DirectoryStorage(here / "models")).reserve("digits", "x", "y")
    os.utime(here / "models/digits/3.saving", (0, 0))
    looked = cli("model", "gc")
    assert (looked.out, looked.err) == ("digits/3  unfinished\n", "nothing was removed; gc --delete does it\n")
    assert (here / "models/digits/3.saving").exists()
    assert cli("model", "gc", "--delete").code == 0
    assert not (here / "models/digits/3.saving").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["save", "Digits", "--from", "runs/7"], 2, "can't be the name of a model"),
        (["save", "digits", "--from", "run/7"], 2, "holds no Datastore 'run'; did you mean runs?"),
        (["save", "digits", "--from", "runs/8"], 2, "runs/8: there is no such directory"),
        (["save", "digits", "--from", "./p.yaml"], 2, "p.yaml: is no directory; give the directory that it is in"),
        (["import", "digits", "p.yaml"], 2, "p.yaml: is no directory, and no archive whose name ends"),
        (["save", "digits", "--from", "models"], 2, "models: holds the store of models itself"),
        (["save", "digits", "--from", "runs/../models"], 4, "'.' and '..' lead nowhere"),
        (["save", "digits", "--from", "runs/7", "--label", "x"], 2, "write NAME=VALUE"),
        (["show", "digits"], 1, "has no version of a model digits"),
        (["list", "digits"], 1, "has no version of a model digits"),
        (["show", "digits:7"], 1, "has no version 7 of a model digits"),
        (["tag", "digits:1", "latest"], 2, "always means the newest version"),
        (["list", "--store", "other"], 2, "holds no Datastore 'other'"),
        (["export", "digits", "out", "--base", "x"], 2, "--base is for oci:DIR"),
        (["export", "digits", "out.zip"], 2, "out.zip: an export is a directory, FILE.tar, which is not compressed"),
        (["export", "digits", "big.tar.gz"], 2, "big.tar.gz: an export is a directory, FILE.tar"),
        (["export", "digits", "file:///srv/out"], 2, "file:///srv/out: an export goes to a directory"),
        (["export", "digits", "s3://bucket/out.tar"], 2, "out.tar: a tar file is written to this machine"),
        (["gc", "--older-than", "soon"], 2, "must be a duration"),
    ],
)
def test_mistakes_are_reported_in_one_line(here: Path, cli: Cli, arguments: list[str], code: int, words: str) -> None:
    found = cli("model", *arguments)
    assert (found.code, found.out) == (code, "")
    assert words in found.err
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1


def test_the_snapshot_of_a_cache_is_saved_with_the_files_that_its_links_lead_to(here: Path, cli: Cli) -> None:
    """As Hugging Face keeps it; without the option a link that leads out is refused, and the option is named."""
    snapshot = here / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (here / "hub" / "blob").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blob")
    refused = cli("model", "save", "gpt", "--from", "./hub/snapshots/abc")
    assert (refused.code, "`model save --follow-links` does so" in refused.err) == (2, True)
    assert cli("model", "save", "gpt", "--from", "./hub/snapshots/abc", "--follow-links").code == 0
    assert tree_of(here / "models" / "gpt" / "1") == {"model.safetensors": ("file 644", b"weights")}
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../nowhere")
    refused = cli("model", "save", "gpt", "--from", "./hub/snapshots/abc", "--follow-links")
    assert (refused.code, "--follow-links" in refused.err) == (2, False)


def test_an_export_to_a_datastore_is_not_taken_for_a_directory(
    here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save --from runs/7` means the Datastore; an export to runs/8 made a directory ./runs/8 without a word."""
    assert cli("model", "save", "digits", "--from", "runs/7").code == 0
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    refused = cli("model", "export", "digits", "runs/8", "-f", here / "p.yaml")
    assert refused.code == 2
    assert "write datastore://runs/8 for a place in it, or ./runs/8 for one on this machine" in refused.err
    assert os.listdir(elsewhere) == []
    assert cli("model", "export", "digits", "./runs/8", "-f", here / "p.yaml").code == 0
    assert os.listdir(elsewhere) == ["runs"]


def test_a_mounted_version_is_unmounted_by_the_pair_of_its_verb(here: Path, cli: Cli) -> None:
    assert cli("model", "save", "digits", "--from", "runs/7").code == 0
    assert cli("model", "mount", "digits:1", "m").code == 0
    found = cli("model", "umount", "m")
    assert (found.code, "is unmounted from" in found.err) == (0, True)


def test_without_a_file_it_says_how_to_name_one(here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASTORE_FILE")
    assert "-f FILE, or DATASTORE_FILE" in cli("model", "list").err
    assert cli("model", "list", "-f", "p.yaml").code == 0


def test_the_error_names_the_datastores_that_may_hold_the_models(here: Path, cli: Cli) -> None:
    text = (here / "p.yaml").read_text().replace("name: models", "name: registry")
    (here / "p.yaml").write_text(text)
    found = cli("model", "list")
    assert (found.code, "say which Datastore holds the models, --store NAME: registry, runs" in found.err) == (2, True)
    assert cli("model", "list", "--store", "registry").code == 0


@promise("S-391")
@pytest.mark.parametrize(("mode", "code", "words"), [("ready", 4, "127.0.0.1:9"), ("unsynced", 6, "are not uploaded")])
def test_a_mount_of_the_source_uploads_first_what_it_has(
    here: Path, cli: Cli, root: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch, mode: str, code: int, words: str
) -> None:
    """What was closed with writeBack is in the bucket before that is read; where it can't be, nothing is saved.

    When it is, the bucket is read, whose server is not there in this test.
    """
    monkeypatch.setenv("FAKE_MODE", mode)
    store = MANIFEST.format(root=here).split("---\n")[0]
    manifest.write_text(f"{store}---\n{manifest.read_text()}")
    assert cli("mount", manifest, "output", here / "m").code == 0

    refused = cli("model", "save", "digits", "--from", "output/7", "-f", manifest)

    assert asked(root, "output") == [{"op": "flush"}]
    assert refused.code == code
    assert words in refused.err
    assert os.listdir(here / "models") == []


@promise("S-388")
def test_progress_is_lines_of_json_for_programs(here: Path, cli: Cli) -> None:
    found = cli("model", "save", "digits", "--from", "runs/7", "--progress", "json")
    events = [json.loads(line) for line in found.err.splitlines() if line.startswith("{")]
    assert [each["phase"] for each in events if each["files"] == each["files_total"]][:1] == ["looking"]
    assert {"phase", "files", "files_total", "bytes", "bytes_total", "elapsed_s", "eta_s"} == set(events[0])


@promise("S-388")
@pytest.mark.parametrize(("signum", "code", "resumes"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)])
def test_a_signal_ends_a_save_in_order(here: Path, signum: int, code: int, resumes: bool) -> None:
    """Ctrl-C leaves nothing; SIGTERM, as when a pod is evicted, leaves what the retry goes on with."""
    size = 16 << 30
    with (here / "runs" / "7" / "weights").open("wb") as file:
        file.truncate(size)  # sparse, and long enough to read
    (here / "runs" / "7" / "a-first").write_bytes(b"x" * 100)
    command = [sys.executable, "-m", "datastore.cli", "model", "save", "digits", "--from", "runs/7", "--save-id", "j"]
    process = subprocess.Popen([*command, "--progress", "json"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if '"reading"' in line and json.loads(line)["bytes"] > 1 << 20:
            break
    process.send_signal(signum)
    rest = process.stderr.read()
    process.stderr.close()

    assert process.wait(PATIENCE_S) == code
    assert all(json.loads(line)["bytes"] < size for line in rest.splitlines() if line.startswith("{")), "it reads on"
    assert f"interrupted by {signal.Signals(signum).name}" in rest
    left = sorted(os.listdir(here / "models" / "digits"))
    assert left == (["1", "1.saving"] if resumes else [])
