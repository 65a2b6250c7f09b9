"""Prepares the data that is read by the workloads: in the bucket with the plain client, and on the local disk."""

from __future__ import annotations

from pathlib import Path

from bench.cell import BIG, SMALL, Bench
from bench.payload import block, blocks
from bench.worker import run_work
from bench.workloads import TINY_SIZE, tree_prefixes

FILL_TIMEOUT_S = 900.0


def fill_bucket(bench: Bench) -> None:
    """Upload a large object, small ones, and very small ones below many prefixes and below one. Errors: WorkFailed."""
    sizes = bench.sizes
    tiny = tree_prefixes(sizes)
    small = {"prefix": SMALL, "count": sizes.small_files, "size": sizes.small_size}
    run_work("nativework.put_multipart", FILL_TIMEOUT_S, store=bench.store, key=BIG, size=sizes.big)
    run_work("nativework.put_objects", FILL_TIMEOUT_S, store=bench.store, threads=16, cap_s=FILL_TIMEOUT_S, **small)
    run_work("nativework.put_tiny", FILL_TIMEOUT_S, store=bench.store, prefixes=tiny, size=TINY_SIZE)


def fill_local(bench: Bench, root: Path) -> None:
    """Write the same files to the disk."""
    sizes = bench.sizes
    root.mkdir(exist_ok=True)
    with (root / BIG).open("wb") as file:
        file.writelines(blocks(sizes.big))
    _write_files(root / SMALL, sizes.small_files, sizes.small_size)
    for prefix, count in tree_prefixes(sizes).items():
        _write_files(root / prefix, count, TINY_SIZE)


def _write_files(folder: Path, count: int, size: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"f{number:05}").write_bytes(block(number, size))
