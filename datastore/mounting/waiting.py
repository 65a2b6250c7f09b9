"""Says, while a command waits for mounts to end, for what it waits and until when."""

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
"""After how long it is said; most mounts have ended by then."""
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
    parts = []
    for record in records:
        try:
            seen = controlclient.brief_status(record.state_dir, _LOOK_S)
        except controlclient.NotAnswering as error:
            parts.append(f"Datastore {record.name}: {error}")
            continue
        unsent = seen.get("unsent")
        left = f"{format_count(unsent, 'changed file')} not uploaded" if isinstance(unsent, int) and unsent else ""
        if words := ", ".join(filter(None, (left, storage_words(seen)))):
            parts.append(f"Datastore {record.name}: {words}")
    return "; ".join(parts)
