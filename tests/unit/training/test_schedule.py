"""datastore.training.schedule: the times of a schedule, and when a job is forgotten (S-325, S-326)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from datastore.errors import InvalidManifest
from datastore.training.schedule import check, due, expires, next_run, run_name, run_of
from tests.promises import promise
from tests.unit.training.jobs import job

NOON = datetime(2026, 3, 28, 12, 0, tzinfo=UTC)


@promise("S-326")
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("schedule: '0 3 * * *'", datetime(2026, 3, 29, 3, 0, tzinfo=UTC)),
        ("schedule: '0 3 * * 1'", datetime(2026, 3, 30, 3, 0, tzinfo=UTC)),
        ("schedule: '0 3 * * *', timeZone: Europe/Berlin", datetime(2026, 3, 29, 1, 0, tzinfo=UTC)),
        ("schedule: '*/15 * * * *'", datetime(2026, 3, 28, 12, 15, tzinfo=UTC)),
    ],
)
def test_the_next_time(spec: str, expected: datetime) -> None:
    """The night of 29 March has no half past two in Berlin, and three o'clock is an hour earlier in UTC."""
    assert next_run(job(spec), NOON) == expected


@promise("S-326")
@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("schedule: '0 25 * * *'", "spec.schedule '0 25 \\* \\* \\*' is wrong: Bad hour"),
        ("schedule: '0 0 31 2 *'", "is wrong"),
        ("schedule: '0 3 * * *', timeZone: Berlin", "spec.timeZone must be a time zone such as Europe/Berlin"),
    ],
)
def test_an_invalid_schedule_is_refused(spec: str, line: str) -> None:
    with pytest.raises(InvalidManifest, match=line):
        check(job(spec))


@promise("S-326")
@pytest.mark.parametrize(
    ("schedule", "slept", "expected"),
    [
        ("*/5 * * * *", timedelta(minutes=4), None),
        ("*/5 * * * *", timedelta(minutes=5), timedelta(minutes=5)),
        ("* * * * *", timedelta(days=300), timedelta(days=300)),
        ("0 12 * * *", timedelta(days=3, hours=5), timedelta(days=3)),
        ("0 12 28 3 *", timedelta(days=400), timedelta(days=365)),
    ],
)
def test_only_the_newest_of_the_missed_times_is_due(
    schedule: str, slept: timedelta, expected: timedelta | None
) -> None:
    found = due(job(f"schedule: '{schedule}'"), NOON, NOON + slept)
    assert found == (None if expected is None else NOON + expected)


@promise("S-326")
def test_a_run_is_a_job_of_its_own_named_after_its_time() -> None:
    made = job("schedule: '0 3 * * 1', ttlSecondsAfterFinished: 60")
    run = run_of(made, NOON)
    assert run.name == run_name(made, NOON) == "digits-2603281200"
    assert (run.spec.schedule, run.spec.command) == (None, made.spec.command)
    assert expires(run, NOON) == NOON + timedelta(seconds=60)


@promise("S-325")
def test_a_job_without_ttl_stays() -> None:
    assert expires(job(), NOON) is None
