"""fsx 0.3.2: random operations on one file, several seeds, with and without mmap, two runs at a time.

`python -m tests.tools.fsx_tier [--operations N] [--seeds N] [DIRECTORY]`. Without DIRECTORY it uses a new mount.
A run that failed can be repeated by its seed: `fsx -S SEED -N 100000 -f CONFIG FILE`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.servers import find_tool, run_versitygw
from tests.tools.mounting import mounted

OPERATIONS = 100_000
SEEDS = 5
TIMEOUT_S = 1200.0
PARALLEL = 2
COMMON = {
    "read": 10,
    "write": 10,
    "truncate": 10,
    "posix_fallocate": 2,
    "punch_hole": 2,
    "sendfile": 2,
    "copy_file_range": 2,
    "posix_fadvise": 1,
    # Each of these causes an upload; together they are 1 operation in 20.
    "close_open": 1,
    "fsync": 0.5,
    "fdatasync": 0.5,
}
WEIGHTS: Mapping[str, Mapping[str, float]] = {
    # The msync(MS_SYNC) after each mapped write causes an upload too: this kind takes longest, so it runs first.
    "with mmap": COMMON | {"mapread": 10, "mapwrite": 3, "invalidate": 1},
    "without mmap": COMMON | {"mapread": 0, "mapwrite": 0, "invalidate": 0},
}


def run_one(directory: Path, kind: str, seed: int, operations: int, absent: Sequence[str] = ()) -> str:
    """Run fsx once and return what is wrong, or ''. absent: operations that this file system does not have."""
    with tempfile.TemporaryDirectory(prefix="fsx-") as artifacts:
        configuration = Path(artifacts, "fsx.toml")
        # Without min = 1 fsx would try a fallocate(2) of 0 bytes, which fails with EINVAL on every file system.
        lines = [
            "[opsize]",
            "min = 1",
            "[weights]",
            *(f"{name} = {0.0 if name in absent else float(weight)}" for name, weight in WEIGHTS[kind].items()),
        ]
        configuration.write_text("\n".join(lines) + "\n")
        file = directory / f"{kind.replace(' ', '-')}-{seed}"
        command = [find_tool("fsx"), "-S", str(seed), "-N", str(operations), "-f", str(configuration), "-P", artifacts]
        started = time.monotonic()
        try:
            done = subprocess.run(
                [*command, str(file)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {TIMEOUT_S:.0f} s"
        clean = done.returncode == 0
        verdict = "clean" if clean else "FAILED"
        print(
            f"fsx {kind}, seed {seed}: {operations:,} operations {verdict} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        return "" if clean else f"{kind}, seed {seed}, exit code {done.returncode}:\n{done.stdout[-3000:]}"


def run_all(directory: Path, operations: int, seeds: int, absent: Sequence[str] = ()) -> int:
    """Run every kind and seed and return the exit code. absent: as of run_one()."""
    runs = list(itertools.product(WEIGHTS, range(1, seeds + 1)))
    with ThreadPoolExecutor(max_workers=PARALLEL) as pool:
        wrong = list(filter(None, pool.map(lambda run: run_one(directory, run[0], run[1], operations, absent), runs)))
    for text in wrong:
        print(text)
    print(f"fsx: {len(runs) - len(wrong)} of {len(runs)} runs clean")
    return 1 if wrong else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fsx_tier")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args(arguments)
    if given.directory is not None:
        return run_all(given.directory, given.operations, given.seeds)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(run_versitygw())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fsx-", ignore_cleanup_errors=True))
        target = stack.enter_context(mounted(server, "fsx", Path(folder, "m")))
        return run_all(target, given.operations, given.seeds)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
