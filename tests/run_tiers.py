"""Run the tiers of tests and say at the end which ran: `python tests/run_tiers.py [--long] [TIER ...]`.

--long: run the tiers that take hours, in place of their shorter forms. With CI=true a tier that cannot run, and a test
that is skipped, is a failure. The last line is 'N passed, N failed'.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.fixtures import obstacle as cluster_obstacle
from tests.glusterfs.server import obstacle as gluster_obstacle
from tests.nfs.host.bed import obstacle as nfs_obstacle
from tests.plain_user import FUSE_DEVICE, Place, here, plain_place
from tests.sftp.sshd import obstacle as sshd_obstacle

STEP_TIMEOUT_S = 3600.0
"""The longest step (a tier of pytest) takes a few minutes; this only ends a hang."""
NO_TESTS_COLLECTED = 5
ENDING = threading.Event()
"""Set when a signal asks this process to end."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command. pytest: its tests are counted one by one; otherwise the exit code is one test."""

    argv: tuple[str, ...]
    pytest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Steps with the same requirements. obstacle: why the tier can't run here, or ''. plain: run it without root. lane:
    neighbours in TIERS that have lanes run side by side, each lane in its order; nothing in them is measured."""

    name: str
    steps: tuple[Step, ...]
    obstacle: Callable[[], str] = lambda: ""
    plain: bool = False
    lane: str = ""


@dataclass(slots=True)
class Tally:
    """The results of a tier."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""


def pytest_step(*arguments: str, workers: int = 2, share: str = "loadfile") -> Step:
    """Run pytest in `workers` processes. share: xdist's --dist; by default whole files, which share costly fixtures."""
    parallel = ("-n", str(workers), "--dist", share) if workers > 1 else ()
    return Step((sys.executable, "-m", "pytest", "-q", *parallel, *arguments), pytest=True)


def script(*arguments: str) -> Step:
    """Run a Python script or module."""
    return Step((sys.executable, *arguments))


IMAGE = script("-m", "tests.cluster.image")
MEASURED = ("tests/cluster/test_controller_crowd.py", "tests/cluster/test_controller_hostile.py")
"""Files with tests that need the machine for themselves."""
NO_NODE = tuple(
    f"tests/cluster/test_{each}.py"
    for each in (
        "accounts",
        "kinds",
        "controller",
        "controller_deletion",
        "controller_keys",
        "controller_rules",
    )
)
"""Files with tests that need only one API server and one controller."""
CONTROLLERS = tuple(f"tests/cluster/test_{each}.py" for each in ("controller_apart", "controller_election"))
"""Files with tests each of which starts a cluster without a node, and waits long for it."""
SERVERS_THAT_MOVE = tuple(f"tests/cluster/test_{each}.py" for each in ("managed_nfs", "second_node"))
"""Files with tests that wait long for pods and nodes, and so run beside the other cluster tests."""
LIBNFS = tuple(f"tests/nfs/test_{each}.py" for each in ("client", "filesystem", "matrix", "mount", "survival", "tools"))
"""Tests of our own NFS client and of all storages; the others test the kernel's client and how exports are made."""
OWN_EXPORTS = ("tests/nfs/test_own_exports.py",)
"""Tests of exports that a cluster makes."""


def cluster_steps(*chosen: str) -> tuple[Step, Step]:
    """Build the image in a step of its own, because that may take minutes; then run the tests."""
    return IMAGE, pytest_step(*chosen, "-m", "e2e_cluster", "--durations=8", workers=1)


def no_fuse() -> str:
    """Why nothing can be mounted, or ''."""
    if not FUSE_DEVICE.exists():
        return f"{FUSE_DEVICE} is absent: load the fuse module, or give the container the device"
    if os.getuid() != 0 and not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        return f"{FUSE_DEVICE} is not open to this user: as root, chmod 0666 {FUSE_DEVICE}"
    return "" if shutil.which("fusermount3") else "fusermount3 is missing: apt-get install fuse3"


def not_root() -> str:
    """Why a mount as root is not possible, or ''."""
    return no_fuse() or ("" if os.getuid() == 0 else "needs root")


def no_nfs_host() -> str:
    """Why there is no NFS host here, or ''."""
    return not_root() or nfs_obstacle()


def no_glusterd() -> str:
    """Why there is no GlusterFS server here, or ''."""
    return not_root() or gluster_obstacle()


def no_sshd() -> str:
    """Why no SSH server's directory can be mounted, or ''."""
    return no_fuse() or sshd_obstacle()


def no_sandbox_for_anyone() -> str:
    """Why no job can run on this machine, or ''."""
    return no_fuse() or ("" if shutil.which("bwrap") else "bwrap is missing: apt-get install bubblewrap")


def no_sandbox() -> str:
    """Why no job can run as root on this machine, or ''."""
    return no_sandbox_for_anyone() or not_root()


TIERS = (
    # There are two lanes up to e2e-cluster-crowd. "waiting" begins with the image that the clusters' tiers need; its
    # other tiers wait: for outages to pass, for processes to start and end, for frameworks that compute.
    Tier(name="image", steps=(IMAGE,), obstacle=cluster_obstacle, lane="waiting"),
    Tier(
        name="check",
        steps=(
            script("-m", "ruff", "check", "."),
            script("-m", "ruff", "format", "--check", "."),
            script("-m", "mypy"),
            Step((str(Path(sys.executable).with_name("lint-imports")), "--no-logo")),
            script("-m", "codespell_lib"),
            pytest_step("tests/unit/test_packaging.py", workers=1),
        ),
        lane="computing",
    ),
    Tier(name="unit", steps=(pytest_step("tests/unit", "--ignore=tests/unit/test_packaging.py"),), lane="computing"),
    Tier(name="wire", steps=(pytest_step("tests/wire"),), lane="waiting"),
    Tier(name="hostile", steps=(pytest_step("tests/hostile"),), lane="waiting"),
    Tier(name="contract", steps=(pytest_step("tests/contract"),), lane="computing"),
    Tier(name="model", steps=(pytest_step("tests/model"),), lane="computing"),
    # Each of the two processes takes one file: in one the frameworks compute, in the other the launcher's tests wait.
    Tier(
        name="training", steps=(pytest_step("tests/training", "--durations=12"),), obstacle=no_sandbox, lane="waiting"
    ),
    # Single tests are distributed, because one file has twice the work of another and cases share no fixture. At every
    # call a process waits for its loop's thread: a third process fills the pauses.
    Tier(name="fault", steps=(pytest_step("tests/fault", workers=3, share="worksteal"),), lane="computing"),
    Tier(
        name="mount-outages",
        steps=(pytest_step("tests/mount", "-m", "slow", workers=1),),
        obstacle=not_root,
        lane="waiting",
    ),
    Tier(name="csi", steps=(pytest_step("tests/csi", workers=1),), obstacle=not_root, lane="waiting"),
    Tier(name="survival", steps=(pytest_step("tests/survival", workers=1),), obstacle=not_root, lane="waiting"),
    Tier(name="mount", steps=(pytest_step("tests/mount", "-m", "not slow"),), obstacle=not_root, lane="computing"),
    Tier(
        name="e2e-cluster-crowd",
        steps=cluster_steps(*MEASURED),
        obstacle=cluster_obstacle,
    ),
    # Each of these tiers runs in one process, so that its tests share an NFS host. There are three hosts, since a guest
    # has one processor.
    Tier(
        name="nfs",
        steps=(
            pytest_step(
                "tests/nfs", "--durations=8", *(f"--ignore={each}" for each in (*LIBNFS, *OWN_EXPORTS)), workers=1
            ),
        ),
        obstacle=no_nfs_host,
        lane="nfs",
    ),
    Tier(
        name="nfs-libnfs",
        steps=(pytest_step(*LIBNFS, "--durations=8", workers=1),),
        obstacle=no_nfs_host,
        lane="libnfs",
    ),
    Tier(
        name="glusterfs",
        steps=(pytest_step("tests/glusterfs", "--durations=8", workers=1),),
        obstacle=no_glusterd,
        lane="libnfs",
    ),
    Tier(name="sftp", steps=(pytest_step("tests/sftp", "--durations=8"),), obstacle=no_sshd, lane="plain"),
    Tier(
        name="training-plain",
        steps=(pytest_step("tests/training", "-m", "plain_user", share="worksteal"),),
        obstacle=no_sandbox_for_anyone,
        plain=True,
        lane="plain",
    ),
    Tier(
        name="mount-plain",
        steps=(pytest_step("tests/mount", "-m", "plain_user and not root_only"),),
        obstacle=no_fuse,
        plain=True,
        lane="plain",
    ),
    Tier(
        name="sftp-plain",
        steps=(pytest_step("tests/sftp", "-m", "plain_user and not root_only and not slow"),),
        obstacle=no_sshd,
        plain=True,
        lane="plain",
    ),
    Tier(
        name="e2e-laptop-plain",
        steps=(pytest_step("tests/e2e", "-m", "e2e_laptop and plain_user"),),
        obstacle=no_fuse,
        plain=True,
        lane="plain",
    ),
    Tier(
        name="nfs-exports",
        steps=(pytest_step(*OWN_EXPORTS, "--durations=8", workers=1),),
        obstacle=no_nfs_host,
        lane="plain",
    ),
    Tier(name="soak", steps=(script("-m", "tests.soak", "--seconds", "75"),), obstacle=no_fuse),
    Tier(
        name="training-cluster",
        steps=(
            IMAGE,
            # One file needs only an API server and simulates the pods, the other waits for real pods.
            pytest_step("tests/cluster", "-m", "e2e_training_cluster", "--durations=8"),
        ),
        obstacle=cluster_obstacle,
        lane="training",
    ),
    Tier(name="e2e-laptop", steps=(pytest_step("tests/e2e", "-m", "e2e_laptop"),), obstacle=not_root, lane="laptop"),
    Tier(name="pjdfstest", steps=(script("-m", "tests.tools.pjdfstest_tier"),), obstacle=not_root, lane="testers"),
    Tier(
        name="fsx",
        steps=(script("-m", "tests.tools.fsx_tier", "--operations", "15000", "--seeds", "2"),),
        obstacle=not_root,
        lane="testers",
    ),
    Tier(name="bench-short", steps=(script("-m", "bench", "--short"),), obstacle=not_root),
    Tier(
        name="e2e-models",
        steps=(IMAGE, pytest_step("tests/cluster", "-m", "e2e_models", "--durations=8", workers=1)),
        obstacle=cluster_obstacle,
        lane="models",
    ),
    Tier(
        name="e2e-cluster-moves",
        steps=cluster_steps(*SERVERS_THAT_MOVE),
        obstacle=cluster_obstacle,
        lane="moves",
    ),
    Tier(name="e2e-cluster-api", steps=cluster_steps(*NO_NODE), obstacle=cluster_obstacle, lane="api"),
    Tier(name="e2e-cluster-apart", steps=cluster_steps(*CONTROLLERS), obstacle=cluster_obstacle, lane="api"),
    Tier(
        name="e2e-cluster",
        steps=cluster_steps(
            "tests/cluster", *(f"--ignore={each}" for each in (*MEASURED, *NO_NODE, *CONTROLLERS, *SERVERS_THAT_MOVE))
        ),
        obstacle=cluster_obstacle,
        lane="cluster",
    ),
)


FSX = ("env", "FSX_OPERATIONS=20000", "FSX_SEEDS=2", sys.executable, "-m", "pytest", "-q", "-s")
LONG_TIERS = (
    Tier(name="fsx", steps=(script("-m", "tests.tools.fsx_tier"),), obstacle=not_root),
    Tier(name="soak", steps=(script("-m", "tests.soak", "--seconds", "1200"),), obstacle=no_fuse),
    Tier(
        name="survival",
        steps=(
            Step(
                ("env", "KILLS=100", "PAIRS=100", sys.executable, "-m", "pytest", "-q", "tests/survival"), pytest=True
            ),
        ),
        obstacle=not_root,
    ),
    Tier(
        name="fsx-nfs",
        steps=(Step((*FSX, "tests/nfs/test_tools.py", "-k", "fsx"), pytest=True),),
        obstacle=no_nfs_host,
    ),
    Tier(
        name="fsx-sftp",
        steps=(Step((*FSX, "tests/sftp/test_mount.py", "-k", "fsx"), pytest=True),),
        obstacle=no_sshd,
    ),
    Tier(
        name="external-storage",
        steps=(
            Step(("tests/cluster/build.sh", "external")),
            IMAGE,
            pytest_step("tests/cluster/test_external_storage.py", "-m", "e2e_external", "-s", workers=1),
        ),
        obstacle=cluster_obstacle,
    ),
    Tier(
        name="models-nfs",
        steps=(IMAGE, pytest_step("tests/cluster/test_models_on_nfs.py", "-m", "e2e_models_long", workers=1)),
        obstacle=cluster_obstacle,
    ),
    Tier(name="scale", steps=(script("-m", "tests.scale"),), obstacle=cluster_obstacle),
)
"""The tiers of `make long`, which check the same promises for much longer."""


def run_step(step: Step, place: Place, tally: Tally, output: IO[bytes] | None) -> None:
    """Run one command until it ends, its time limit passes or this process is asked to end; count its results."""
    argv = [str(place.python) if part == sys.executable else part for part in step.argv]
    with tempfile.TemporaryDirectory(prefix="datastore-tier-") as directory:
        report = Path(directory, "report.xml")
        if step.pytest:
            argv.append(f"--junitxml={report}")
            if place.uid is not None and place.gid is not None:
                os.chown(directory, place.uid, place.gid)
        shown = " ".join(Path(part).name if "/" in part else part for part in argv)
        say(f"\n== {tally.name}: {shown}", output)
        code = wait(place.popen(argv, os.environ, output), output)
        if step.pytest and report.exists():
            count_report(report, code, tally)
        elif code == 0:
            tally.passed += 1
        else:
            tally.failed += 1


def say(line: str, output: IO[bytes] | None) -> None:
    """Write a line to a tier's output; None: to standard output."""
    if output is None:
        print(line, flush=True)
    else:
        os.write(output.fileno(), line.encode() + b"\n")


def wait(process: subprocess.Popen[bytes], output: IO[bytes] | None) -> int:
    """Return the exit code; on a time limit, or when this process has to end, end the whole process group."""
    until = time.monotonic() + STEP_TIMEOUT_S
    while time.monotonic() < until and not ENDING.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1.0)
    say(f"== ending the step: {'interrupted' if ENDING.is_set() else 'over its time limit'}", output)
    for number, patience_s in ((signal.SIGINT, 30), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
            break
    return -1


def count_report(report: Path, code: int, tally: Tally) -> None:
    """Add up a JUnit report; a run that broke without a failed test counts as one failure."""
    failed = 0
    for suite in ElementTree.parse(report).iter("testsuite"):
        broken = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        # A strict xfail ran, and failed as a server's declared deviation says: pytest's report counts it as skipped.
        expected = len(suite.findall("testcase/skipped[@type='pytest.xfail']"))
        skipped = int(suite.get("skipped", 0)) - expected
        failed += broken
        tally.skipped += skipped
        tally.passed += max(0, int(suite.get("tests", 0)) - broken - skipped)
    if code not in (0, NO_TESTS_COLLECTED) and failed == 0:
        failed = 1
    tally.failed += failed


def run_tier(tier: Tier, plain: Callable[[], Place], output: IO[bytes] | None = None) -> Tally:
    """Run a tier, or note why it can't run."""
    tally = Tally(tier.name)
    started = time.monotonic()
    tally.note = tier.obstacle()
    if not tally.note:
        place = plain() if tier.plain else here()
        for step in tier.steps:
            if not ENDING.is_set():
                run_step(step, place, tally, output)
        if tally.passed == 0 and tally.failed == 0:
            tally.note = f"{tally.skipped} skipped, none ran"
    tally.seconds = time.monotonic() - started
    if os.environ.get("CI") == "true":
        judge_strictly(tally)
    return tally


def run_lane(tiers: Sequence[Tier], plain: Callable[[], Place], aside: bool) -> list[Tally]:
    """Run the tiers of a lane one after another. aside: the output of each tier is shown when it has ended."""
    if not aside:
        return [run_tier(tier, plain) for tier in tiers]
    tallies = []
    for tier in tiers:
        with tempfile.TemporaryFile() as output:
            say(f"== {tier.name}: runs beside the next one; what it writes follows at its end", None)
            tallies.append(run_tier(tier, plain, output))
            output.seek(0)
            say(output.read().decode(errors="replace"), None)
    return tallies


def run_all(tiers: Sequence[Tier], plain: Callable[[], Place]) -> list[Tally]:
    """Run tiers in their order: those without a lane one by one, neighbours that have lanes side by side."""
    tallies: list[Tally] = []
    for _, neighbours in itertools.groupby(tiers, key=lambda tier: bool(tier.lane)):
        tallies += run_lanes(list(neighbours), plain)
    names = [tier.name for tier in tiers]
    return sorted(tallies, key=lambda tally: names.index(tally.name))


def run_lanes(tiers: Sequence[Tier], plain: Callable[[], Place]) -> list[Tally]:
    """Run lanes side by side; the last one's output is shown as it comes. Tiers without a lane form one lane."""
    lanes = [[tier for tier in tiers if tier.lane == lane] for lane in dict.fromkeys(tier.lane for tier in tiers)]
    with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
        running = [pool.submit(run_lane, lane, plain, aside=lane is not lanes[-1]) for lane in lanes]
        return [tally for lane in running for tally in lane.result()]


def judge_strictly(tally: Tally) -> None:
    """Count skipped tests and tiers that could not run as failures, as in CI nothing may be left out."""
    if tally.skipped:
        tally.note = f"{tally.skipped} skipped; in CI that is a failure"
        tally.failed += tally.skipped
    elif tally.note:
        tally.failed += 1


def table(tallies: Sequence[Tally]) -> Iterator[str]:
    """Yield the lines of a table that says what ran."""
    yield f"{'tier':<18} {'ran':<4} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>8}  why not"
    for tally in tallies:
        ran = "yes" if tally.passed or (tally.failed and not tally.note) else "no"
        yield (
            f"{tally.name:<18} {ran:<4} {tally.passed:>6} {tally.failed:>6} {tally.skipped:>7} {tally.seconds:>8.1f}"
            f"  {tally.note}"
        )


def main(names: Sequence[str]) -> int:
    """Run the named tiers, or all; return the exit code."""
    tiers = LONG_TIERS if "--long" in names else TIERS
    names = [name for name in names if name != "--long"]
    unknown = set(names) - {tier.name for tier in tiers}
    if unknown:
        print(f"no such tier: {', '.join(sorted(unknown))}; there are: {', '.join(tier.name for tier in tiers)}")
        return 2
    chosen = [tier for tier in tiers if tier.name in names or not names]
    with contextlib.ExitStack() as places:
        tallies = run_all(chosen, functools.cache(lambda: places.enter_context(plain_place())))
    print()
    print("\n".join(table(tallies)))
    failed = sum(tally.failed for tally in tallies)
    print(f"{sum(tally.passed for tally in tallies)} passed, {failed} failed", flush=True)
    if ENDING.is_set():
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT and SIGQUIT ignored, and the programs of the tests would inherit that.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # Thousands of processes start, and with this variable each would compile all that it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ENDING.set())
    sys.exit(main(sys.argv[1:]))
