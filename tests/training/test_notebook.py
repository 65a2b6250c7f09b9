"""datastore.training.submit: the same for programs and notebooks (S-339)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import datastore.training
from datastore.errors import DatastoreError, InvalidManifest
from tests.promises import promise
from tests.training.laptop import Laptop

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(600)]

JOB = {
    "apiVersion": "datastore.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "noted"},
    "spec": {"framework": "none", "command": ["sh", "-c", "until [ -e go ]; do sleep 0.1; done"]},
}


@pytest.fixture
def notebook(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel of Jupyter, as far as a display goes; what it shows, one text after the other.

    The job may end when it was seen to run.
    """
    shown: list[str] = []

    def show(what: Any) -> None:
        shown.append(what._repr_html_())
        if "Running" in shown[-1]:
            (laptop.directory / "go").touch()

    def display(what: Any, display_id: bool) -> SimpleNamespace:
        assert display_id
        show(what)
        return SimpleNamespace(update=show)

    ipython, displaying = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    displaying.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", displaying)
    return shown


@promise("S-339")
def test_a_notebook_shows_the_job_while_it_runs(
    laptop: Laptop, notebook: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(laptop.directory)
    job = datastore.training.submit(JOB)
    assert job.watch().status.phase == "Succeeded"
    assert any("Running" in each for each in notebook)
    assert "<td>master-0</td><td>Succeeded (0)</td>" in notebook[-1]
    assert [line.text for line in job.logs()] == []
    job.delete()


@promise("S-339")
def test_a_program_submits_a_file_and_waits(
    laptop: Laptop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(laptop.directory)
    command = "[sh, -c, 'echo hello; until [ -e go ]; do sleep 0.1; done']"
    file = laptop.manifest("programmed", f"  framework: none\n  command: {command}\n")
    job = datastore.training.submit(file)
    with pytest.raises(TimeoutError, match="TrainingJob programmed is still"):
        job.wait(0.0)
    (laptop.directory / "go").touch()
    job.watch()
    assert "programmed · Succeeded · master 1/1 · the training has succeeded" in capsys.readouterr().out
    assert [line.text for line in datastore.training.job("programmed").logs()] == ["hello"]


@promise("S-339")
def test_mistakes_raise_an_error_of_one_line(laptop: Laptop, tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest, match=r"spec.framework must be"):
        datastore.training.submit({**JOB, "spec": {"framework": "keras", "command": ["a"]}})


@promise("S-339")
@pytest.mark.timeout(120)
def test_a_schedule_has_no_end_that_could_be_waited_for(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(laptop.directory)
    job = datastore.training.submit({**JOB, "spec": {**JOB["spec"], "schedule": "0 3 1 1 *"}})  # type: ignore[dict-item]
    for wait in (job.wait, job.watch):
        with pytest.raises(DatastoreError, match=r"TrainingJob noted has a schedule.* none was yet"):
            wait()
    job.delete()
