"""pjdfstest 0.2.2 as root on new mounts: `python -m tests.tools.pjdfstest_tier [DIRECTORY]`.

Without DIRECTORY it runs on one mount over versitygw and one over MinIO, at the same time (the tests mostly sleep).
Every failure must be listed in docs/PJDFSTEST.md with its reason, and each mount may have at most 50. With DIRECTORY
it runs only there, and nothing may fail; that checks the runner itself.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import find_tool, run_minio, run_versitygw
from tests.tools.mounting import mounted

BAR = 50
"""The most failures: 35 need a hard link, 14 a path of 4,095 bytes, and one fails now and then."""
TIMEOUT_S = 900.0
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "PJDFSTEST.md"
CONFIGURATION = """\
[features]
posix_fallocate = {}
utime_now = {}
utimensat = {}
[settings]
# Above the grain of our times, which is a nanosecond, and of the kernel's, which is some milliseconds.
naptime = 0.05
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"""
RESULT = re.compile(r"^(?P<test>[\w:]+)\s+(?P<verdict>ok|FAILED|skipped)$", re.MULTILINE)
ROW = re.compile(r"^\|\s*`(?P<test>[\w:]+)`\s*\|(?P<servers>[^|]*)\|\s*(?P<reason>[^|]*\S)\s*\|\s*$", re.MULTILINE)
SERVERS = {"versitygw": run_versitygw, "minio": run_minio}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one run. complete: it reached its summary."""

    where: str
    passed: frozenset[str]
    failed: frozenset[str]
    skipped: frozenset[str]
    complete: bool
    log: str = field(repr=False)


def parse(where: str, log: str) -> Outcome:
    """Parse the program's output."""
    found: dict[str, set[str]] = {"ok": set(), "FAILED": set(), "skipped": set()}
    for line in RESULT.finditer(log):
        found[line["verdict"]].add(line["test"])
    return Outcome(
        where=where,
        passed=frozenset(found["ok"]),
        failed=frozenset(found["FAILED"]),
        skipped=frozenset(found["skipped"]),
        complete="\nSummary: " in log,
        log=log,
    )


def explained(document: str, where: str) -> frozenset[str]:
    """Return the tests for whose failure on this server the document gives a reason."""
    return frozenset(row["test"] for row in ROW.finditer(document) if where in row["servers"].lower())


def run_in(where: str, directory: Path) -> Outcome:
    """Run all tests in a directory that every user may enter."""
    work = directory / "pjdfstest"
    work.mkdir()
    work.chmod(0o777)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as configuration:
        configuration.write(CONFIGURATION)
        configuration.flush()
        command = [find_tool("pjdfstest"), "-c", configuration.name, "-p", str(work)]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return parse(where, (error.stdout or b"").decode(errors="replace"))
    return parse(where, done.stdout)


def run_on(where: str) -> Outcome:
    """Run all tests on a new mount over a new server."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(SERVERS[where]())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pjd-", ignore_cleanup_errors=True))
        # The tests switch to other users, who have to enter the folder.
        Path(folder).chmod(0o755)
        target = stack.enter_context(mounted(server, "pjdfstest", Path(folder, "m"), "--allow-other"))
        return run_in(where, target)


def judge(outcome: Outcome, allowed: frozenset[str], bar: int) -> bool:
    """Print the results; return whether they are good enough."""
    surprises = sorted(outcome.failed - allowed)
    counts = f"{len(outcome.passed)} ok, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
    print(f"pjdfstest on {outcome.where}: {counts} (at most {bar} may fail, each with its reason)")
    for test in surprises:
        print(f"  failed without a reason in docs/{DOCUMENT.name}: {test}")
        detail = re.search(rf"^{re.escape(test)}\s+FAILED\n((?:\t.*\n|\s+.*\n)*)", outcome.log, re.MULTILINE)
        if detail:
            print(f"    {' '.join(detail[1].split())[:300]}")
    for test in sorted(allowed & outcome.passed):
        print(f"  docs/{DOCUMENT.name} lists it as failing, but it passes: {test}")
    if not outcome.complete:
        print(f"  it did not reach its end; the last lines:\n{outcome.log[-1500:]}")
    return outcome.complete and not surprises and len(outcome.failed) <= bar and bool(outcome.passed)


def main(arguments: Sequence[str]) -> int:
    if arguments:
        return 0 if judge(run_in("directory", Path(arguments[0])), frozenset(), bar=0) else 1
    document = DOCUMENT.read_text()
    with ThreadPoolExecutor(max_workers=len(SERVERS)) as pool:
        outcomes = list(pool.map(run_on, SERVERS))
    good = [judge(outcome, explained(document, outcome.where), BAR) for outcome in outcomes]
    return 0 if all(good) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
