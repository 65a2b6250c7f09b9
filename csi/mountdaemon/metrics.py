"""The metrics of all mounts of the node, in the text format of Prometheus, with the volume as a label.

The mounts of a cluster have no endpoints of their own (datastore.fuse.prometheus), because Prometheus scrapes pods, not
one port for each mount. A mount that does not answer in time has only the metric datastore_mount_up, with the value 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from datastore import controlclient
from datastore.controlclient import Answer

from ..errors import NotAnswering
from ..textformat import Family, Sample, rendered
from .daemon import MountState

STATUS_TIMEOUT_S = 2.0
METHODS = 64
"""The most methods of the storage, and the most kinds of errors of each, in one mount's metrics; there are fewer."""
ASKED_AT_ONCE = 16


def of_mounts(states: Iterable[MountState]) -> str:
    """Ask all mounts for their status, and return the page for a scrape."""
    listed = list(states)
    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="scrape") as pool:
        answers = list(pool.map(_ask, listed))
    told = zip(listed, answers, strict=True)
    samples = [each for state, answer in told for each in _told(state.volume_id, answer)]
    samples += [
        ("datastore_mount_oom_kills_total", {"volume": each.volume_id}, float(each.oom_kills)) for each in listed
    ]
    return rendered(FAMILIES, samples)


FAMILIES = (
    Family("datastore_mount_up", "gauge", "Whether the mount's server answers."),
    Family("datastore_mount_confined", "gauge", "Whether its server is confined to what it needs."),
    Family("datastore_mount_unsent_files", "gauge", "Files that are not in the storage yet."),
    Family("datastore_mount_unsent_bytes", "gauge", "Their bytes."),
    Family("datastore_mount_nodes", "gauge", "Files and directories that the kernel knows."),
    Family("datastore_mount_server_restarts_total", "counter", "Servers that were replaced."),
    Family(
        "datastore_mount_oom_kills_total", "counter", "Processes that the kernel killed for the mount's memory limit."
    ),
    Family("datastore_store_calls_total", "counter", "Calls to the storage by method."),
    Family("datastore_store_received_bytes_total", "counter", "Bytes from the storage by method."),
    Family("datastore_store_sent_bytes_total", "counter", "Bytes to the storage by method."),
    Family("datastore_store_errors_total", "counter", "Calls that failed, by method and class."),
)


def _ask(state: MountState) -> Answer:
    try:
        return controlclient.brief_status(Path(state.state_dir), STATUS_TIMEOUT_S)
    except NotAnswering:
        return {}


def _told(volume_id: str, answer: Answer) -> list[Sample]:
    """Return a mount's samples. A malformed answer, as of a hacked server, counts as no answer."""
    try:
        return list(_samples(volume_id, answer))
    except (AttributeError, OverflowError, TypeError, ValueError):
        return list(_samples(volume_id, {}))


def _samples(volume_id: str, answer: Mapping[str, Any]) -> Iterator[Sample]:
    of = {"volume": volume_id}
    yield "datastore_mount_up", of, float(answer.get("ok") is True)
    if not answer:
        return
    if "unconfined" in answer:
        yield "datastore_mount_confined", of, float(not answer["unconfined"])
    unsent = answer.get("unsent", {})
    yield "datastore_mount_unsent_files", of, float(unsent.get("files", 0))
    yield "datastore_mount_unsent_bytes", of, float(unsent.get("bytes", 0))
    yield "datastore_mount_nodes", of, float(answer.get("nodes", 0))
    yield "datastore_mount_server_restarts_total", of, float(answer.get("restarts", 0))
    for method, counts in islice(answer.get("store", {}).items(), METHODS):
        by = {**of, "method": str(method)}
        yield "datastore_store_calls_total", by, float(counts.get("calls", 0))
        yield "datastore_store_received_bytes_total", by, float(counts.get("received_bytes", 0))
        yield "datastore_store_sent_bytes_total", by, float(counts.get("sent_bytes", 0))
        for kind, count in islice(counts.get("errors", {}).items(), METHODS):
            yield "datastore_store_errors_total", {**by, "error": str(kind)}, float(count)
