"""When a scheduled job runs, and when a finished job is deleted. Pure: the caller gives the present time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from datastore.api.trainingjob import TrainingJob
from datastore.errors import InvalidManifest

_LOOKED_BACK_H = (1, 24, 24 * 31, 24 * 366)
"""The hours that due() looks back for the newest time: in the first, a job of every minute has only 60 times."""


def check(job: TrainingJob) -> None:
    """Check the job's schedule and time zone. Errors: InvalidManifest when one of them is not valid."""
    if job.spec.schedule is not None:
        next_run(job, datetime.now(UTC))


def next_run(job: TrainingJob, after: datetime) -> datetime:
    """Return the first time of the schedule later than `after`, in UTC. Errors: InvalidManifest, as in check()."""
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
    """Return the newest time of the schedule after `last` and until `now`, or None. Older times are skipped: after a
    sleep of the machine there may be many."""
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
    """Return the name of the run at that time: NAME-YYMMDDHHMM, in UTC."""
    return f"{job.name}-{time.astimezone(UTC):%y%m%d%H%M}"


def run_of(job: TrainingJob, time: datetime) -> TrainingJob:
    """Return the TrainingJob of one run: the same job under the run's name, without the schedule."""
    spec = job.spec.model_copy(update={"schedule": None})
    metadata = job.metadata.model_copy(update={"name": run_name(job, time)})
    return job.model_copy(update={"spec": spec, "metadata": metadata, "status": None})


def expires(job: TrainingJob, completed: datetime) -> datetime | None:
    """Return when a job that ended at `completed` is to be deleted; None: never."""
    ttl_s = job.spec.ttl_seconds_after_finished
    return None if ttl_s is None else completed + timedelta(seconds=ttl_s)
