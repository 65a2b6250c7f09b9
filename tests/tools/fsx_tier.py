"""fsx 0.3.2: 100,000 random operations on one file, five seeds, with and without mmap, two runs at a time.

`python -m tests.tools.fsx_tier [DIRECTORY [OPERATIONS]]`. Without DIRECTORY: on a fresh mount over versitygw.
A run that fails is repeated by its seed: `fsx -S SEED -N 100000 -f CONFIG FILE`.
"""

from __future__ import annotations

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
SEEDS = (1, 2, 3, 4, 5)
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
    # Each of these is an upload; together 1 in 20.
    "close_open": 1,
    "fsync": 0.5,
    "fdatasync": 0.5,
}
WEIGHTS: Mapping[str, Mapping[str, float]] = {
    # msync(MS_SYNC) after each mapped write is an upload too: it takes longest, so it begins.
    "with mmap": COMMON | {"mapread": 10, "mapwrite": 3, "invalidate": 1},
    "without mmap": COMMON | {"mapread": 0, "mapwrite": 0, "invalidate": 0},
}


def run_one(directory: Path, kind: str, seed: int, operations: int) -> str:
    """One run; what is wrong, or ''."""
    with tempfile.TemporaryDirectory(prefix="fsx-") as artifacts:
        configuration = Path(artifacts, "fsx.toml")
        # fsx fails by itself on the fallocate(2) of no bytes that it would try: EINVAL, on every file system.
        lines = [
            "[opsize]",
            "min = 1",
            "[weights]",
            *(f"{name} = {float(weight)}" for name, weight in WEIGHTS[kind].items()),
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


def run_all(directory: Path, operations: int) -> int:
    """Every kind and seed; the exit code."""
    runs = list(itertools.product(WEIGHTS, SEEDS))
    with ThreadPoolExecutor(max_workers=PARALLEL) as pool:
        wrong = list(filter(None, pool.map(lambda run: run_one(directory, run[0], run[1], operations), runs)))
    for text in wrong:
        print(text)
    print(f"fsx: {len(runs) - len(wrong)} of {len(runs)} runs clean")
    return 1 if wrong else 0


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if arguments:
        return run_all(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else OPERATIONS)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(run_versitygw())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fsx-", ignore_cleanup_errors=True))
        target = stack.enter_context(mounted(server, "fsx", Path(folder, "m")))
        return run_all(target, OPERATIONS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
