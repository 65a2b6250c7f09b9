"""`python -m tests.soak [--seconds 1200] [--no-kills] [--out bench/results/soak]`:
hours of mixed work in minutes, while servers are killed.

A load that checks its data runs on a real mount of versitygw; the mount's server is killed and the store goes away at
random. No operation may fail, no byte may be wrong or lost, and memory, descriptors, threads and disk must not grow.
Prints a table; exit code 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from tests.mount.mounts import Mount, mounted
from tests.mount.outages import Breakable, breakable
from tests.servers import boto_client, make_bucket
from tests.soak.disturb import SHORT, Disturber, Pace
from tests.soak.load import Log, Worker
from tests.soak.report import Outcome, draw, markdown
from tests.soak.samples import FILLING, MIB, Sample, Sampler, growth, look_at, resting

BUCKET = "soak-bucket"
WORKERS = 5
CACHE_MIB = 256
WARM_UP_SHARE, WARM_UP_MOST_S = 0.15, 60.0
CALM_S = 150.0
"""Longest wait for running operations to end, and then for all to be sent; it covers an outage and its retries."""
SAMPLES = 240
STUCK_S = 180.0
SHORT_S = 300.0
LITTLE_MEMORY = "192Mi"


class Soak:
    """One soak on one mount."""

    def __init__(self, storage: Breakable, mount: Mount, seconds: float, *, kills: bool = True) -> None:
        self._storage, self._mount, self._seconds, self._kills = storage, mount, seconds, kills
        self._warm_up_s = min(seconds * WARM_UP_SHARE, WARM_UP_MOST_S)
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self.log = Log()
        self._workers = [Worker(mount.path, number, self.log, self._stopping) for number in range(WORKERS)]
        (self._state,) = (mount.folder / "state/kube-datastore/mounts").iterdir()
        self._pending_at = 0.0
        about = (
            f"{os.cpu_count()} cores, kernel {platform.release()}, versitygw on the same machine; {WORKERS} workers."
        )
        self.outcome = Outcome(seconds, about, self.log)

    def run(self) -> Outcome:
        """Run the whole soak and return its outcome."""
        for worker in self._workers:
            worker.start()
        try:
            self._work(self._warm_up_s)
            self._rest()
            self._disturbed()
            self._rest()
            self._judge()
        finally:
            self._stopping.set()
            for worker in self._workers:
                worker.join(STUCK_S)
        return self.outcome

    def _work(self, seconds: float) -> None:
        """Let the load run; end early when no operation ends for STUCK_S."""
        self._set_going(True)
        end = time.monotonic() + seconds
        moved_at, count = time.monotonic(), self.log.operations
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(1.0, left_s))
            if self.log.operations != count:
                moved_at, count = time.monotonic(), self.log.operations
            elif time.monotonic() - moved_at > STUCK_S:
                self.outcome.wrong.append(f"no operation ended for {STUCK_S:.0f} s")
                return

    def _disturbed(self) -> None:
        left_s = self._seconds - self._warm_up_s  # the time at rest does not count
        pace = SHORT if self._seconds < SHORT_S else Pace()
        disturber = Disturber(self._storage, self._mount.pids[0], self._began, pace, kills=self._kills)
        sampler = Sampler(self._look, max(0.5, left_s / SAMPLES))
        sampler.start()
        disturber.start()
        try:
            self._work(left_s)
        finally:
            disturber.stop()
            sampler.stop()
            self.outcome.samples, self.outcome.events = sampler.samples, disturber.events
            if disturber.failure:
                self.outcome.wrong.append(disturber.failure)

    def _rest(self) -> None:
        """Stop the load, wait until everything is sent, and take a sample."""
        self._set_going(False)
        end = time.monotonic() + CALM_S
        while not all(worker.idle.is_set() for worker in self._workers) and time.monotonic() < end:
            time.sleep(0.1)
        end = time.monotonic() + CALM_S
        unsent, pending = 1, 1
        sample: Sample | None = None
        while (unsent or pending or sample is None) and time.monotonic() < end:
            time.sleep(0.5)
            with contextlib.suppress(Exception):
                unsent = len(self._mount.told()["dirty"])
                pending = self._pending()  # a new server ends the uploads of a killed one
            sample = self._look_once()
        if sample is None:
            self.outcome.wrong.append("no server lives at rest")
            return
        now = replace(sample, operations=self.log.operations, pending=pending, unsent=unsent)
        self.outcome.resting.append(now)

    def _set_going(self, going: bool) -> None:
        for worker in self._workers:
            worker.idle.clear()
            if going:
                worker.going.set()
            else:
                worker.going.clear()

    def _look(self) -> Sample | None:
        sample = self._look_once()
        if sample is None:
            return None
        pending = -1
        if time.monotonic() - self._pending_at > self._seconds / 40:
            self._pending_at = time.monotonic()
            with contextlib.suppress(Exception):
                pending = self._pending()
        return replace(sample, operations=self.log.operations, pending=pending)

    def _look_once(self) -> Sample | None:
        return look_at(self._mount.pids[0], self._state, self._mount.folder / "cache", self._began)

    def _pending(self) -> int:
        return len(boto_client(self._storage.server).list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))

    def _judge(self) -> None:
        wrong = self.outcome.wrong
        if self.log.failed:
            wrong.append(f"{self.log.failed} operations failed")
        filling = FILLING if self._seconds < SHORT_S else 0
        wrong += growth(self.outcome.samples, filling)
        if len(self.outcome.resting) == 2:
            first, last = self.outcome.resting
            wrong += resting(first, last, CACHE_MIB * MIB, filling)

        def stored(worker: Worker, name: str) -> bytes:
            return self._mount.objects.get(os.path.normpath(f"{worker.root.name}/{name}"))

        wrong += self._lost("through the mount", lambda worker, name: (worker.root / name).read_bytes())
        wrong += self._lost("in the bucket", stored)

    def _lost(self, where: str, read: Callable[[Worker, str], bytes]) -> list[str]:
        found = []
        for worker in self._workers:
            for name, body in worker.files.items():
                try:
                    same = read(worker, name) == body
                except Exception as error:
                    found.append(f"{worker.name} {name} can't be read {where}: {error}")
                else:
                    if not same:
                        found.append(f"{worker.name} {name} is wrong {where}")
        return found[:20]


@contextlib.contextmanager
def environment() -> Iterator[Path]:
    """Yield a home of its own; remove the user's variables that could have an effect."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "DATASTORE_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        yield home
    finally:
        if not os.path.ismount(home / "m/mnt"):
            shutil.rmtree(home, ignore_errors=True)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Hours of mixed work while things die.")
    parser.add_argument("--seconds", type=float, default=1200.0, help="default: 1200")
    parser.add_argument("--out", type=Path, help="where the table and the chart go, without .md and .png")
    parser.add_argument("--no-kills", action="store_true", help="one server lives all the time: does its memory grow?")
    options = parser.parse_args(words)
    with environment() as home:
        (home / "s3").mkdir()
        with breakable(str(home / "s3")) as storage:
            make_bucket(storage.server, BUCKET)
            cache = {"size": f"{CACHE_MIB}Mi"}
            # With little memory a server's caches are full after a minute, and what still grows is a leak.
            memory = ("--memory", LITTLE_MEMORY) if options.no_kills else ()
            with mounted(storage.server, BUCKET, home, folder=home / "m", options=memory, cache=cache) as mount:
                outcome = Soak(storage, mount, options.seconds, kills=not options.no_kills).run()
                if outcome.wrong:
                    _keep_log(home)
    text = markdown(outcome)
    sys.stdout.write(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(text)
        draw(outcome, options.out.with_suffix(".png"))
    return 1 if outcome.wrong else 0


def _keep_log(home: Path) -> None:
    """Print the end of the server's log, which says why."""
    for file in home.glob("m/state/kube-datastore/mounts/*/mount.log"):
        sys.stdout.write(f"-- the end of {file.name}\n{file.read_text(errors='replace')[-6000:]}\n")


def stop_once(_signal: int, _frame: FrameType | None) -> None:
    """Clean up and end; ignore further signals, as each step of the clean-up is bounded in time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop_once)
    signal.signal(signal.SIGINT, stop_once)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
