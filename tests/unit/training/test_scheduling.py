"""datastore.training.local.scheduling: a time of a schedule whose job can't be made or started (S-326)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from datastore import ourprocess
from datastore.api.manifest import parse
from datastore.cli.exitcodes import ExitCode
from datastore.errors import DatastoreError
from datastore.mounting.signals import watching
from datastore.training.local import scheduling
from datastore.training.local.records import JobDirectory, Submitter, all_directories, directory_of
from tests.promises import promise
from tests.unit.training.jobs import job

NOON = datetime(2026, 3, 28, 12, 0, tzinfo=UTC)
RUN = "digits-2603281200"
SUBMITTER = Submitter(environment={}, directory="/")


@pytest.fixture
def scheduled() -> Iterator[JobDirectory]:
    """Of a job of every minute."""
    made = directory_of("digits", "default")
    made.make(job("schedule: '* * * * *'", framework="none"), parse("", "digits.yaml", wanted=""), SUBMITTER)
    yield made
    for each in list(all_directories()):
        each.remove()


def come_noon(scheduled: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the schedule until it has handled noon, and return what it reports."""

    def due(*_: object) -> datetime:
        scheduled.write_wanted("suspend")
        return NOON

    monkeypatch.setattr(scheduling, "due", due)
    with watching() as watch:
        scheduling.Scheduler(scheduled, SUBMITTER, watch).run()
    return scheduled.read_state().status.message or ""


@promise("S-326")
def test_a_job_that_has_the_name_of_a_run_stays(scheduled: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran already, and the clock was set back; or somebody gave a job this name."""
    there = directory_of(RUN, "default")
    there.make(job(framework="none", name=RUN), parse("", "digits.yaml", wanted=""), SUBMITTER)
    there.log("master-0").write_text("it ran\n")
    said = come_noon(scheduled, monkeypatch)
    assert there.log("master-0").read_text() == "it ran\n"
    assert f"{RUN} could not start: TrainingJob {RUN} exists already" in said


@promise("S-326")
def test_a_run_that_can_not_start_is_told_and_forgotten(
    scheduled: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DatastoreError("Datastore data: no such bucket")

    monkeypatch.setattr(ourprocess, "start", refuse)
    assert come_noon(scheduled, monkeypatch) == f"{RUN} could not start: Datastore data: no such bucket"
    assert [each.name for each in all_directories()] == ["digits"]


@promise("S-326", "S-333")
def test_a_schedule_goes_on_while_its_disk_is_full(scheduled: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ourprocess, "start", full)
    monkeypatch.setattr(JobDirectory, "write_state", full)
    come_noon(scheduled, monkeypatch)
    assert [each.name for each in all_directories()] == ["digits"]


def test_a_schedule_can_not_be_followed(tmp_path: Path) -> None:
    """A schedule has no end and no log of its own. Nothing is created then."""
    file = tmp_path / "digits.yaml"
    body = job("schedule: '* * * * *'", framework="none").model_dump(by_alias=True, mode="json", exclude_unset=True)
    file.write_text(yaml.safe_dump(body))
    command = [sys.executable, "-m", "datastore.cli", "job", "submit", "-f", str(file), "--local", "--follow"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == ExitCode.USAGE
    assert "TrainingJob digits has a schedule" in done.stderr
    assert not list(all_directories())
