"""When a scheduled job runs, and when a finished one is deleted. Pure: the time is given."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from datastore.api.trainingjob import TrainingJob
from datastore.errors import InvalidManifest

_LOOKED_BACK_H = (1, 24, 24 * 31, 24 * 366)
"""The newest of many times is looked for from near to far: a job of every minute has 60 in the first hour."""


def check(job: TrainingJob) -> None:
    """Errors: InvalidManifest, for a schedule that is none and a time zone that nobody knows."""
    if job.spec.schedule is not None:
        next_run(job, datetime.now(UTC))


def next_run(job: TrainingJob, after: datetime) -> datetime:
    """The first time of the schedule after `after`, in UTC. Errors: InvalidManifest."""
    assert job.spec.schedule is not None, "it has no schedule"
    where = f"TrainingJob {job.name}"
    try:
        zone = ZoneInfo(job.spec.time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidManifest(
            f"{where}: spec.timeZone must be a time zone such as Europe/Berlin, not {job.spec.time_zone[:64]!r}"
        ) from None
    try:
        return next(CronSim(job.spec.schedule, after.astimezone(zone))).astimezone(UTC)
    except (CronSimError, StopIteration) as error:
        what = str(error) or "this time never comes"
        raise InvalidManifest(f"{where}: spec.schedule {job.spec.schedule!r} is wrong: {what}") from None


def due(job: TrainingJob, last: datetime, now: datetime) -> datetime | None:
    """The time that has come since `last`, if any; of several, as after a sleep of the machine, the newest only."""
    if next_run(job, last) > now:
        return None
    for hours in _LOOKED_BACK_H:
        newest, since = None, max(last, now - timedelta(hours=hours))
        while (time := next_run(job, newest or since)) <= now:
            newest = time
        if newest:
            return newest
    return next_run(job, last)


def run_name(job: TrainingJob, time: datetime) -> str:
    """Name of the run of that time: NAME-YYMMDDHHMM, in UTC."""
    return f"{job.name}-{time.astimezone(UTC):%y%m%d%H%M}"


def run_of(job: TrainingJob, time: datetime) -> TrainingJob:
    """The TrainingJob of one run: the same without the schedule."""
    spec = job.spec.model_copy(update={"schedule": None})
    metadata = job.metadata.model_copy(update={"name": run_name(job, time)})
    return job.model_copy(update={"spec": spec, "metadata": metadata, "status": None})


def expires(job: TrainingJob, completed: datetime) -> datetime | None:
    """When a job that ended at `completed` is deleted; None: never."""
    ttl_s = job.spec.ttl_seconds_after_finished
    return None if ttl_s is None else completed + timedelta(seconds=ttl_s)
