"""Says, while a command waits for a job to end, for what it waits and until when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from datastore import controlclient
from datastore.mounting.records import MountRecord, all_records
from datastore.mounting.silence import storage_words
from datastore.training.local.records import JobDirectory
from datastore.units import format_count

FIRST_S = 3.0
"""After how long it is said; most jobs have ended by then."""
AGAIN_S = 30.0
_LOOK_S = 2.0


@contextmanager
def told(directory: JobDirectory, deadline: float, say: Callable[[str], None]) -> Iterator[None]:
    """A context that waits for a job to end. Call `say` with a line once that takes long, and again when what is
    waited for has changed. deadline: until when (time.monotonic()) it is waited for."""
    over = threading.Event()
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - time.monotonic()))

    def tell() -> None:
        said, pause_s = "", FIRST_S
        while not over.wait(pause_s):
            pause_s = AGAIN_S
            if (what := _what(directory)) != said and not over.is_set():
                said = what
                say(f"waits for TrainingJob {directory.name} to end, until {until} at the latest: {what}")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def mounts_of(directory: JobDirectory) -> list[MountRecord]:
    """Return the records of the job's mounts, also of those that ended with changes which are not uploaded."""
    below = str(directory.path / "mounts") + os.sep
    return [each for each in all_records() if each.mountpoint.startswith(below)]


def _what(directory: JobDirectory) -> str:
    """Return what the job still does, as far as its mounts can tell."""
    parts = []
    for record in mounts_of(directory):
        try:
            seen = controlclient.brief_status(record.state_dir, _LOOK_S)
        except controlclient.NotAnswering as error:
            parts.append(f"Datastore {record.name}: {error}")
            continue
        unsent = seen.get("unsent")
        left = f"{format_count(unsent, 'changed file')} not uploaded" if isinstance(unsent, int) and unsent else ""
        if words := ", ".join(filter(None, (left, storage_words(seen)))):
            parts.append(f"Datastore {record.name}: {words}")
    return "; ".join(parts) or "its processes are being ended, and its Datastores unmounted"
