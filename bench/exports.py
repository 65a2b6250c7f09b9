"""N1: an NFS export through our mount over libnfs, compared with plain libnfs and the kernel's NFS client.

The server is knfsd in a guest (an emulated machine), whose disk is a file of this machine. The kernel's client runs in
a second guest, because this machine's kernel may lack one, so that its figures say less than the others. Before each
figure the page caches of host and guests are dropped, and the client that is measured mounts anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.bars import NATIVE, OURS
from bench.cell import EXPECTED, MB, Answer, Cell, Group
from bench.metrics import EXPORT_FIGURES, Figure
from bench.processes import drop_caches
from bench.worker import ROOT
from tests.nfs.host.bed import Bed, obstacle
from tests.nfs.host.guest import Guest
from tests.tools.mounting import NAME, Client

KERNEL = "kernel"
THREADS = {"one": 1, "sixteen": 16}
PYTHON = str(ROOT / ".venv/bin/python")

Work = Callable[..., Answer]
"""Runs a function of filework.py by name, with its path or folder given relative to the export."""


def measure_export(cell: Cell) -> None:
    """Measure each metric on all three clients in turn. Errors: RuntimeError why this machine can't run the guests."""
    if reason := obstacle():
        raise RuntimeError(reason)
    bed = Bed(Path(tempfile.mkdtemp(prefix="bench-nfs-", dir=cell.bench.folder)))
    bed.up()
    try:
        with bed.network.entered():
            _measure(cell, bed)
    finally:
        bed.down()


def _measure(cell: Cell, bed: Bed) -> None:
    export, sizes = bed.server.export("bench"), cell.sizes
    small = {"count": sizes.small_files, "size": sizes.small_size, "cap_s": sizes.cap_s}
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "N1.write": ("write_sequential", {"path": "big", "size": sizes.big}),
        "N1.read": ("read_sequential", {"path": "big", "size": sizes.big, "cap_s": sizes.cap_s}),
    }
    for name, threads in THREADS.items():
        asked[f"N1.create_{name}"] = "create_files", {"folder": name, "threads": threads, **small}
    for name, threads in THREADS.items():
        asked[f"N1.read_{name}"] = "read_files", {"folder": name, "threads": threads, **small}
    made: dict[str, int] = {}
    for metric, (work, arguments) in asked.items():
        for subject, opened in ((OURS, _ours), (NATIVE, _native), (KERNEL, _kernel)):
            for guest in (bed.server, bed.client):
                guest.shell("sync; echo 3 >/proc/sys/vm/drop_caches")
            drop_caches()
            try:
                with opened(cell, bed, export) as run:
                    place: dict[str, Any] = {
                        key: f"{subject}-{each}" for key, each in arguments.items() if key in ("path", "folder")
                    }
                    if "path" in place:
                        place["path"] += "/file"
                    if work == "read_files":
                        place["count"] = made.get(place["folder"], sizes.small_files)
                    answer = run(work, **{**arguments, **place})
                    if work == "create_files":  # fewer than asked for, if the time limit came first
                        made[place["folder"]] = int(answer["count"])
                    figure = _figure(metric, answer, sizes.big, cell.load)
            except EXPECTED as error:
                figure = Figure(math.nan, error=" ".join(str(error).split())[-300:], load=cell.load)
            cell.bench.results.add(subject, metric, figure)
            cell.bench.say(f"{subject:>14}  {metric:<16} {figure.error or format(figure.value, '.4g')}")


def _figure(metric: str, answer: Answer, big: int, load: float) -> Figure:
    seconds = answer["seconds"] if "seconds" in answer else answer["closed"] - answer["began"]
    amount = answer["count"] if "count" in answer else answer.get("bytes", big) / MB
    return Figure(amount / max(seconds, 1e-9), partial=bool(answer.get("partial")), load=load)


@contextlib.contextmanager
def _ours(cell: Cell, bed: Bed, export: str) -> Iterator[Work]:
    """Mount the export with the `datastore` command."""
    with tempfile.TemporaryDirectory(prefix="n1-", dir=cell.bench.folder, ignore_cleanup_errors=True) as folder:
        client, target = Client(Path(folder)), Path(folder, "mnt")
        (client.folder / "run").mkdir(mode=0o700)
        document = {
            "apiVersion": "datastore.dev/v1alpha1",
            "kind": "Datastore",
            "metadata": {"name": NAME},
            "spec": {"nfs": {"server": bed.server.address, "path": export}},
        }
        (client.folder / "datastore.yaml").write_text(json.dumps(document))
        client.run("mount", client.folder / "datastore.yaml", NAME, target)
        try:
            yield lambda name, **arguments: cell.work(f"filework.{name}", **_below(str(target), arguments))
        finally:
            client.run("umount", target)


@contextlib.contextmanager
def _native(cell: Cell, bed: Bed, export: str) -> Iterator[Work]:
    """Work through plain libnfs, without a mount."""
    place = {"server": bed.server.address, "export": export}
    yield lambda name, **arguments: cell.work(f"nfsnative.{name}", **place, **_below("", arguments))


@contextlib.contextmanager
def _kernel(cell: Cell, bed: Bed, export: str) -> Iterator[Work]:
    """Mount the export in the client guest with the kernel's client, as a Kubernetes node does; work in that guest."""
    guest, target = bed.client, "/mnt/bench"
    source = {"kind": "nfs", "server": bed.server.address, "path": export}
    asked = {"source": source, "mountpoint": target, "readOnly": False, "metadataTTL": 1.0}
    guest.run("mkdir", "-p", target)
    said = guest.run(PYTHON, "-m", "datastore.nfsmount", text=json.dumps(asked))
    if "error" in json.loads(said):
        raise RuntimeError(said)
    try:
        yield lambda name, **arguments: _in_the_guest(guest, cell.sizes.cell_s, name, _below(target, arguments))
    finally:
        try:
            guest.run("umount", target)
        except AssertionError:  # the guest's NFS client hangs: reboot the guest for the next cell
            guest.reboot(orderly=False)


def _in_the_guest(guest: Guest, timeout_s: float, name: str, arguments: dict[str, object]) -> Answer:
    """Run a function of filework in a guest. Errors: RuntimeError."""
    job = json.dumps({"work": f"filework.{name}", "arguments": arguments})
    try:
        said = guest.run("env", f"PYTHONPATH={ROOT}", PYTHON, "-m", "bench.worker", text=job, timeout_s=timeout_s)
    except AssertionError as error:
        raise RuntimeError(str(error)) from error
    answer: Answer = json.loads(said)
    if "error" in answer:
        raise RuntimeError(str(answer["error"]))
    return answer


def _below(top: str, arguments: dict[str, object]) -> dict[str, object]:
    return {key: f"{top}/{each}" if key in ("path", "folder") else each for key, each in arguments.items()}


GROUPS = (
    Group(
        ("N1",),
        measure_export,
        tuple(f"N1.{name}" for name in EXPORT_FIGURES),
        needs_data=False,
        only=frozenset({OURS}),
    ),
)
