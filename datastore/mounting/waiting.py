"""Says, while a command waits for mounts to end, what it waits for and until when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from datastore import controlclient
from datastore.mounting.records import MountRecord
from datastore.mounting.silence import storage_words
from datastore.units import format_count

FIRST_S = 3.0
"""The time after which it says so; most mounts have ended by then."""
AGAIN_S = 30.0
_LOOK_S = 2.0


@contextmanager
def told(what: str, deadline: float, why: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """A context that waits for something (`what`). Call `say` with a line once that takes long, and again when `why`,
    which is called in another thread, returns another reason. deadline: until when (time.monotonic()) it waits."""
    over = threading.Event()
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - time.monotonic()))

    def tell() -> None:
        said, pause_s = "", FIRST_S
        while not over.wait(pause_s):
            pause_s = AGAIN_S
            if (reason := why()) != said and not over.is_set():
                said = reason
                say(f"waits for {what} to end, until {until} at the latest: {reason}")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def left_of(records: Sequence[MountRecord]) -> str:
    """Return what these mounts have not uploaded, and what is wrong with their storage; '' for nothing."""

    def words(seen: controlclient.Answer) -> str:
        unsent = seen.get("unsent")
        left = f"{format_count(unsent, 'changed file')} not uploaded" if isinstance(unsent, int) and unsent else ""
        return ", ".join(filter(None, (left, storage_words(seen))))

    return _of_each(records, words)


def trouble_of(records: Sequence[MountRecord]) -> str:
    """Return what is wrong with the storage or the server of these mounts; '' for nothing. Mounts by the kernel's own
    clients have no server to ask."""
    return _of_each([each for each in records if not each.in_kernel], storage_words)


def _of_each(records: Sequence[MountRecord], words: Callable[[controlclient.Answer], str]) -> str:
    parts = []
    for record in records:
        try:
            said = words(controlclient.brief_status(record.state_dir, _LOOK_S))
        except controlclient.NotAnswering as error:
            said = str(error) if record.pids else "its mount has crashed, and programs get errors from it"
        if said:
            parts.append(f"Datastore {record.name}: {said}")
    return "; ".join(parts)
