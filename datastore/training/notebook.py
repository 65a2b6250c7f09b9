"""Functions with which programs and notebooks submit a job, as `datastore job submit` does, and observe it."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from datastore.api.manifest import load, parse
from datastore.api.trainingjob import KIND
from datastore.errors import DatastoreError
from datastore.training.driver import Driver, LogLine, Observed
from datastore.training.launchers import existing, of_cluster
from datastore.training.local.driver import LocalDriver

_POLL_S = 0.5
_SHOWN_LINES = 10


class Job:
    """A submitted TrainingJob, which a notebook shows as a table. watch() renews that until the job has finished."""

    def __init__(self, driver: Driver, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace
        self._driver = driver

    def observe(self) -> Observed:
        """Return the present state of the job, or its last state if it has ended. Errors: DatastoreError."""
        return self._driver.observe(self.name, self.namespace)

    @property
    def phase(self) -> str:
        """The phase: Pending, Running, Restarting, Suspended, Scheduled, Succeeded or Failed."""
        return self.observe().status.phase or "Pending"

    def logs(self, *, follow: bool = False) -> Iterator[LogLine]:
        """Yield the lines of the replicas' logs. follow: continue until the job has ended."""
        return self._driver.logs(self.name, self.namespace, follow=follow)

    def wait(self, timeout_s: float | None = None) -> Observed:
        """Wait until the job has finished. Errors: TimeoutError after timeout_s; the job continues then. DatastoreError
        for a job with a schedule, which has no end."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (observed := self._with_an_end()).finished:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"TrainingJob {self.name} is still {observed.status.phase} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return observed

    def watch(self) -> Observed:
        """Show the job until it has finished: in a notebook a table that is renewed, elsewhere a line per change.
        An interrupt ends the watching, not the job. Errors: DatastoreError, also for a job with a schedule."""
        show = _display()
        before = ""
        while True:
            observed = self._with_an_end()
            if show is not None:
                show(self)
            elif (line := _line(observed)) != before:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
                before = line
            if observed.finished:
                return observed
            time.sleep(_POLL_S)

    def _with_an_end(self) -> Observed:
        """Return the present state of the job. Errors: DatastoreError when it has a schedule, which has no end."""
        observed = self.observe()
        if observed.job.spec.schedule is not None:
            last = observed.status.last_run
            raise DatastoreError(
                f"TrainingJob {self.name} has a schedule, which has no end, and each run is a job of its own; "
                + (f"look at the last one: datastore.training.job({last!r})" if last else "none was yet")
            )
        return observed

    def free(self) -> float:
        """End all processes of the job, keep its logs and figures, and return how many seconds that took."""
        return self._driver.free(self.name, self.namespace)

    def delete(self) -> None:
        """End and remove the job; what is in its Datastores stays."""
        self._driver.delete(self.name, self.namespace)

    def __repr__(self) -> str:
        return f"<TrainingJob {_line(self.observe())}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the states and figures of the replicas, and the last _SHOWN_LINES log lines."""
        observed = self.observe()
        now: dict[tuple[str, int], dict[str, Any]] = {}
        with suppress(DatastoreError):  # then the figures of the evidence are shown
            now = {(each["role"], each["index"]): each for each in self._driver.metrics(self.name, self.namespace)}
        rows = []
        for each in observed.evidence.replicas:
            used = now.get((each.role, each.index), {})
            usage = each.usage
            cpu = used.get("cpu", usage.cpu.mean if usage else 0.0)
            memory = used.get("memory", usage.memory.peak if usage else 0.0)
            code = "" if each.exit_code is None else f" ({each.exit_code})"
            cells = (each.name, f"{each.state}{code}", f"{cpu:.2f}", f"{memory / (1 << 20):.0f} MiB")
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        wrote = () if observed.job.spec.schedule is not None else self.logs()  # each run has a log of its own
        lines = [f"[{each.role}-{each.index}] {each.text}" for each in wrote][-_SHOWN_LINES:]
        head = "".join(f"<th>{name}</th>" for name in ("replica", "state", "CPU", "memory"))
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        shown = html.escape("\n".join(lines))
        return f"<b>{html.escape(_line(observed))}</b><table><tr>{head}</tr>{table}</table><pre>{shown}</pre>"


def submit(
    manifest: str | Path | Mapping[str, Any] | list[Mapping[str, Any]],
    name: str | None = None,
    *,
    container: bool = False,
    cluster: bool = False,
) -> Job:
    """Submit a TrainingJob to this machine, or to a cluster, and show it if this is a notebook.
    manifest: a YAML file, or its documents as mappings (the job, its Datastores, their Secrets). name: the job's, if
    the manifest has several. container: run the job's image by podman or docker on this machine. cluster: run the job
    in the cluster of kubectl's context. Errors: DatastoreError, with nothing left behind."""
    if isinstance(manifest, str | Path):
        loaded = load(manifest, KIND)
    else:
        documents = [manifest] if isinstance(manifest, Mapping) else manifest
        loaded = parse(yaml.safe_dump_all([dict(each) for each in documents]), "the manifest", KIND)
    job = loaded.pick_job(name)
    driver: Driver = of_cluster() if cluster else LocalDriver(container=container)
    made = Job(driver, job.name, driver.create(job, loaded).job.namespace)
    if (show := _display()) is not None:
        show(made)
    return made


def job(name: str, namespace: str = "") -> Job:
    """Return a TrainingJob that was submitted before, to this machine or to the cluster. Errors: NoSuchJob.
    namespace '': "default" on this machine, and that of kubectl's context in the cluster."""
    driver, namespace = existing(name, namespace)
    driver.observe(name, namespace)
    return Job(driver, name, namespace)


def _line(observed: Observed) -> str:
    status = observed.status
    counted = ", ".join(f"{each.role} {each.active + each.succeeded}/{each.replicas}" for each in status.roles or [])
    parts = [observed.job.name, status.phase or "Pending", counted, status.message or ""]
    return " · ".join(part for part in parts if part)


def _display() -> Any:
    """Return a function that displays a Job and replaces the display at later calls; None outside of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    display = sys.modules.get("IPython.display") or __import__("IPython.display", fromlist=["display"])
    handles: list[Any] = []

    def show(what: Job) -> None:
        if handles:
            handles[0].update(what)
        else:
            handles.append(display.display(what, display_id=True))

    return show


__all__ = ["DatastoreError", "Job", "job", "submit"]
