"""What every mount of the node says of itself, in the text format of Prometheus, with the volume as a label.

The names are those of a mount's own endpoint (datastore.fuse.prometheus), which a cluster's mounts do not open: a port
for each would be no use to who collects by pod. One that does not answer in time is up 0 and has nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import KeeperAway
from ..textformat import Family, rendered
from . import control
from .host import KeptState

STATUS_TIMEOUT_S = 2.0
ASKED_AT_ONCE = 16


def of_mounts(states: Iterable[KeptState]) -> str:
    """One scrape."""
    listed = list(states)
    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="scrape") as pool:
        answers = list(pool.map(_ask, listed))
    told = zip(listed, answers, strict=True)
    samples = [each for state, answer in told for each in _samples(state.volume_id, answer)]
    return rendered(FAMILIES, samples)


FAMILIES = (
    Family("datastore_mount_up", "gauge", "Whether the mount's server answers."),
    Family("datastore_mount_unsent_files", "gauge", "Files that are not in the storage yet."),
    Family("datastore_mount_unsent_bytes", "gauge", "Their bytes."),
    Family("datastore_mount_nodes", "gauge", "Files and directories that the kernel knows."),
    Family("datastore_mount_server_restarts_total", "counter", "Servers that were replaced."),
    Family("datastore_store_calls_total", "counter", "Calls to the storage by method."),
    Family("datastore_store_received_bytes_total", "counter", "Bytes from the storage by method."),
    Family("datastore_store_sent_bytes_total", "counter", "Bytes to the storage by method."),
    Family("datastore_store_errors_total", "counter", "Calls that failed, by method and class."),
)

Sample = tuple[str, Mapping[str, str], float]


def _ask(state: KeptState) -> control.Answer:
    try:
        return control.ask(Path(state.state_dir), {"op": "status"}, STATUS_TIMEOUT_S)
    except KeeperAway:
        return {}


def _samples(volume_id: str, answer: Mapping[str, Any]) -> Iterator[Sample]:
    of = {"volume": volume_id}
    yield "datastore_mount_up", of, float(answer.get("ok") is True)
    if not answer:
        return
    unsent = [each for each in answer.get("dirty", []) if isinstance(each, dict)]
    yield "datastore_mount_unsent_files", of, len(unsent)
    yield "datastore_mount_unsent_bytes", of, sum(int(each.get("bytes") or 0) for each in unsent)
    yield "datastore_mount_nodes", of, float(answer.get("nodes", 0))
    yield "datastore_mount_server_restarts_total", of, float(answer.get("restarts", 0))
    for method, counts in answer.get("store", {}).items():
        by = {**of, "method": str(method)}
        yield "datastore_store_calls_total", by, counts.get("calls", 0)
        yield "datastore_store_received_bytes_total", by, counts.get("received_bytes", 0)
        yield "datastore_store_sent_bytes_total", by, counts.get("sent_bytes", 0)
        for kind, count in counts.get("errors", {}).items():
            yield "datastore_store_errors_total", {**by, "error": str(kind)}, count
