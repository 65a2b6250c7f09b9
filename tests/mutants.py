"""`python -m tests.mutants [--seconds 3600] [--seed N]`: small changes of the code that no test notices.

Cosmic Ray makes single changes (an operator, a condition turned round) of fuse/vfs/{lookup,change,upload}, in copies of
the repository, and tests/unit/vfs runs on each. The seed chooses which, as many as the time allows. Prints the
survivors as differences: each wants a test, or is code that can go. Exit code 1 when there are some.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fuse/vfs/lookup", "fuse/vfs/change", "fuse/vfs/upload")
TESTS = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/vfs")
UNCHANGED_TIMEOUT_S = 600.0
TIMES_LONGER = 4.0
"""How many times as long as on the unchanged code the tests may take; a mutant that takes longer counts as noticed."""
SAYS_LITTLE = re.compile("core/(NumberReplacer|RemoveDecorator|ReplaceBinaryOperator_BitOr_.*)")
"""Operators to leave out: they change limits and periods, decorators of dataclasses, or annotations (`Node | None`)."""


def copied(place: Path) -> Path:
    """Copy the files of the repository, with uncommitted changes."""
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return place


def all_mutations(database: Path) -> list[MutationSpec]:
    """Return every single change that Cosmic Ray knows of, but those that say little."""
    modules = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
    work = WorkDB(str(database), WorkDB.Mode.create)
    init(modules, work, {})
    found = [mutation for item in work.work_items for mutation in item.mutations]
    work.close()
    lines = {module: (ROOT / module).read_text().splitlines() for module in modules}

    def says_something(mutation: MutationSpec) -> bool:
        signature = lines[mutation.module_path][mutation.start_pos[0] - 1].lstrip().startswith("def ")
        return not signature and not SAYS_LITTLE.fullmatch(mutation.operator_name)

    return [each for each in found if says_something(each)]


class Copy:
    """A copy of the repository in which mutants are tested one after the other."""

    def __init__(self, place: Path) -> None:
        self.place = copied(place)
        self._command = shlex.join(("env", "-C", str(place), *TESTS))

    def seconds(self) -> float:
        """Return how long the tests of the unchanged code take. Errors: SystemExit if they fail."""
        began = time.monotonic()
        outcome, said = run_tests(self._command, UNCHANGED_TIMEOUT_S)
        if outcome is not TestOutcome.SURVIVED:
            sys.exit(f"the unchanged code does not pass its tests:\n{said[-3000:]}")
        return time.monotonic() - began

    def survivor(self, mutation: MutationSpec, timeout_s: float) -> str:
        """Return the mutant's difference if no test notices it, else ''. Errors: RuntimeError if it can't be made."""
        here = attrs.evolve(mutation, module_path=self.place / mutation.module_path)
        result = mutate_and_test([here], self._command, timeout_s)
        if result.worker_outcome is not WorkerOutcome.NORMAL:
            raise RuntimeError(f"{mutation.module_path}: {mutation.operator_name}: {result.output}")
        found = result.test_outcome is not TestOutcome.SURVIVED
        return "" if found else str(result.diff).replace(f"{self.place}/", "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        mutations = all_mutations(Path(folder, "work.sqlite"))
        random.Random(given.seed).shuffle(mutations)
        total, waiting = len(mutations), iter(mutations)
        copies = [Copy(Path(folder, str(number))) for number in range(os.cpu_count() or 1)]
        timeout_s = copies[0].seconds() * TIMES_LONGER
        deadline = time.monotonic() + given.seconds
        lock, stopping = threading.Lock(), threading.Event()
        tried, survivors = itertools.count(1), list[str]()

        def work(copy: Copy) -> None:
            while time.monotonic() < deadline and not stopping.is_set():
                with lock:
                    mutation = next(waiting, None)
                if mutation is None:
                    return
                difference = copy.survivor(mutation, timeout_s)
                with lock:
                    number = next(tried)
                    if difference:
                        survivors.append(difference)
                        print(f"{number}: nobody notices\n{difference}\n", flush=True)

        with ThreadPoolExecutor(len(copies)) as pool:
            try:
                list(pool.map(work, copies))
            finally:
                stopping.set()
        done = next(tried) - 1
    print(f"seed {given.seed}: {done} of {total} mutants tried, {done - len(survivors)} noticed, {len(survivors)} not")
    return 1 if survivors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
