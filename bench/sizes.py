"""How large each workload is: the full size, and a short one for CI."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes in bytes, times in seconds. cap_s: after this time the loop of a cell ends early, and its rate is that of
    the part that was done. cell_s: after this time a cell that hangs is killed."""

    runs: int = 2
    big: int = GIB
    small_files: int = 2000
    small_size: int = 100 * KIB
    tree_folders: int = 200
    tree_files: int = 100
    flat_files: int = 20_000
    random_reads: int = 500
    meta_calls: int = 100
    cap_s: float = 20.0
    walk_cap_s: float = 60.0
    cell_s: float = 180.0
    in_s3_s: float = 60.0
    keys: int = 1_000_000
    keys_per_folder: int = 1000
    stream: int = 10 * GIB
    open_files: int = 10_000
    memory_cell_s: float = 900.0
    first_bytes: int = 5
    kills: int = 20
    model_files: int = 20
    model_bytes: int = 5 * GIB
    model_small_files: int = 10_000
    model_small_bytes: int = 10 * KIB
    model_s: float = 900.0


FULL = Sizes()
SHORT = Sizes(
    # More runs, because each figure takes less than a second, and a pause of the machine may be half of that.
    runs=3,
    big=128 * MIB,
    small_files=300,
    tree_folders=40,
    tree_files=100,
    flat_files=4000,
    random_reads=100,
    meta_calls=20,
    cap_s=5.0,
    walk_cap_s=10.0,
    cell_s=120.0,
    in_s3_s=60.0,
    keys=20_000,
    stream=256 * MIB,
    open_files=500,
    first_bytes=3,
    kills=3,
    model_bytes=200 * MIB,
    model_small_files=500,
    model_s=120.0,
)
