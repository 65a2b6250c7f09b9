"""`python -m bench [--only W1,W5] [--peers s3fs,rclone-full] [--short]`: measure, and say which bars (goals) are met.

Everything is measured in one run on one versitygw, or on one MinIO with --server minio, over TLS with --tls, and with
--rtt 20 as if the server were 20 ms away. The table goes to standard output and, with a chart, into bench/results/;
progress goes to standard error. Exit code: 1 with --short when a bar is missed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import exports, memory, models, programs_group, workloads
from bench.bars import BARS, LOCAL, NATIVE, OURS, SHORT_AGAINST, SHORT_ALLOWANCE, Verdict, judge, last_line
from bench.bucket import BUCKET, Bucket
from bench.cell import Bench, Cell, Group
from bench.chart import draw
from bench.distance import distant
from bench.metrics import WORKLOADS, Results
from bench.peers import PEERS
from bench.prepare import fill_bucket, fill_local
from bench.processes import can_drop_caches
from bench.report import markdown
from bench.sizes import FULL, SHORT, Sizes
from bench.subjects import PeerMount, Subject, own_subjects
from tests.authority import HERE, Authority
from tests.servers import Server, make_bucket, run_minio, run_versitygw

SERVERS = {"versitygw": run_versitygw, "minio": run_minio}
RESULTS = Path(__file__).resolve().parent / "results"
GROUPS = (*workloads.GROUPS, *memory.GROUPS, *programs_group.GROUPS, *models.GROUPS, *exports.GROUPS)
SHORT_WORKLOADS = ("W1", "W2", "W3", "W5", "W6", "W7", "W8")
SHORT_SUBJECTS = frozenset({OURS, "ours-ro", NATIVE, LOCAL})


def choose_workloads(text: str, short: bool) -> tuple[str, ...]:
    """Return the workloads that --only names. Errors: argparse.ArgumentTypeError, with the known names, if unknown."""
    wanted = tuple(word.strip().upper() for word in text.split(",") if word.strip())
    unknown = [word for word in wanted if word not in WORKLOADS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return wanted or (SHORT_WORKLOADS if short else WORKLOADS)


def choose_peers(text: str | None) -> list[str]:
    """Return the peers that --peers names, or all installed. Errors: argparse.ArgumentTypeError if not installed."""
    installed = [peer.name for peer in PEERS if peer.present]
    if text is None:
        return installed
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    missing = [word for word in wanted if word not in installed]
    if missing:
        raise argparse.ArgumentTypeError(f"not here: {', '.join(missing)}; installed: {', '.join(installed) or 'none'}")
    return wanted


def plan(subjects: Sequence[Subject], wanted: Sequence[str], runs: int) -> Iterator[tuple[int, Group, Subject]]:
    """Yield the cells in order: figures that are compared are measured one right after the other."""
    for run in range(runs):
        for group in GROUPS:
            if not any(workload in wanted for workload in group.workloads) or (run and group.once):
                continue
            yield from ((run, group, subject) for subject in subjects if group.fits(subject))


def measure(bench: Bench, subjects: Sequence[Subject], wanted: Sequence[str], progress: Progress) -> None:
    """Measure all cells and add their figures to bench.results."""
    cells = list(plan(subjects, wanted, bench.sizes.runs))
    task = progress.add_task("", total=len(cells))
    for run, group, subject in cells:
        progress.update(task, description=f"{'+'.join(group.workloads)} {subject.name}, run {run + 1}")
        cell = Cell(bench, subject, f"w-{subject.name}-{group.workloads[0]}-{run}")
        group.run(cell)
        bench.bucket.remove(f"{cell.tag}/")
        progress.advance(task)


def open_subjects(server: Server, folder: Path, peers: Sequence[str], short: bool) -> list[Subject]:
    """Return our mounts and the bases (native, local) first, then the peers that can use the server."""
    own = [each for each in own_subjects(server, folder) if not short or each.name in SHORT_SUBJECTS]
    able = [peer for peer in PEERS if peer.name in peers and (peer.trusts or not server.ca_file)]
    return [*own, *(PeerMount(peer, server, folder / peer.name) for peer in able)]


def about(sizes: Sizes, server: Server, short: bool, rtt_ms: float) -> list[str]:
    """Return the paragraph of the report that says when and under which conditions the figures were measured."""
    over = " over TLS" if server.ca_file else ""
    where = f"{server.name}{over} {f'at {rtt_ms:g} ms of round trip' if rtt_ms else 'on the same machine'}"
    cold = "" if can_drop_caches() else " The page cache could not be dropped (not root): cold is not quite cold."
    return [
        f"{time.strftime('%Y-%m-%d %H:%M')}; {os.cpu_count()} cores, kernel {platform.release()}, Python "
        f"{platform.python_version()}; {where}; {sizes.runs} runs"
        f"{', short: half of each bar, or of what was reached, is asked for' if short else ''}.{cold}"
    ]


@contextlib.contextmanager
def prepared(sizes: Sizes, results: Results, console: Console, options: argparse.Namespace) -> Iterator[Bench]:
    """Start the server and prepare its data; remove everything at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir, ignore_cleanup_errors=True)
            )
        )
        for name in ("s3", "tls"):
            (folder / name).mkdir()
        identity = Authority(folder / "tls").issue(options.server, HERE) if options.tls else None
        server = stack.enter_context(SERVERS[options.server](data_dir=str(folder / "s3"), identity=identity))
        make_bucket(server, BUCKET)
        bench = Bench(server, Bucket(server), sizes, folder, results, console.print)
        console.print("filling the bucket and the disk")
        fill_bucket(bench)
        fill_local(bench, folder / LOCAL)
        yield replace(bench, server=stack.enter_context(distant(server, options.rtt))) if options.rtt else bench


def finish(results: Results, heading: Sequence[str], short: bool, files: Path) -> list[Verdict]:
    """Judge the figures, write the table and the chart to files, print the table, and return the verdicts."""
    wanted = [bar for bar in BARS if not short or bar.against in SHORT_AGAINST]
    verdicts = judge(wanted, results, SHORT_ALLOWANCE if short else 1.0)
    text = markdown(results, verdicts, heading)
    files.parent.mkdir(parents=True, exist_ok=True)
    files.with_suffix(".md").write_text(text)
    draw(results, verdicts, files.with_suffix(".png"))
    sys.stdout.write(text)
    return verdicts


def forget_environment() -> None:
    """Remove the user's environment variables that could change which server the clients use, and how."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "RCLONE_", "DATASTORE_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the mount beside its peers.")
    parser.add_argument("--only", metavar="W1,W5", default="", help="these workloads; default: all")
    parser.add_argument(
        "--peers", metavar="NAME,NAME", help="these peers, '' for none; default: all that are installed"
    )
    parser.add_argument("--short", action="store_true", help="small sizes, no peers, half of each bar; for CI")
    parser.add_argument("--server", choices=SERVERS, default="versitygw", help="on which all is measured")
    parser.add_argument("--tls", action="store_true", help="speak https to it; peers that take no authority stay away")
    parser.add_argument("--rtt", type=float, default=0.0, metavar="MS", help="put the server so far away, in ms")
    parser.add_argument("--runs", type=int, help="how often each cell is measured; the better one stands")
    parser.add_argument("--dir", help="where the server's data, the caches and the local files go; default: TMPDIR")
    parser.add_argument("--out", type=Path, help="where the table and the chart go, without .md and .png")
    options = parser.parse_args(words)
    try:
        options.only = choose_workloads(options.only, options.short)
        options.peers = choose_peers("" if options.short and options.peers is None else options.peers)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    options.out = options.out or RESULTS / ("short" if options.short else "latest")
    return options


def main(words: Sequence[str]) -> int:
    options = arguments(words)
    forget_environment()
    sizes = SHORT if options.short else FULL
    sizes = replace(sizes, runs=options.runs or sizes.runs)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    results = Results()
    interrupted = False
    heading: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
            prepared(sizes, results, console, options) as bench,
        ):
            heading = about(sizes, bench.server, options.short, options.rtt)
            subjects = open_subjects(bench.server, bench.folder, options.peers, options.short)
            measure(bench, subjects, options.only, progress)
    except KeyboardInterrupt:
        interrupted = True
        heading = [*heading, "Interrupted: what follows is not all."]
    verdicts = finish(results, heading, options.short, options.out)
    if interrupted:
        return 130
    missed = [verdict for verdict in verdicts if verdict.met is False]
    if options.short and missed:
        console.print(f"bench: {last_line(verdicts)}; with --short that is a failure")
        return 1
    return 0


def stop_once(_signal: int, _frame: FrameType | None) -> None:
    """Clean up and end; ignore further signals, as each step of the clean-up is bounded in time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    # SIGINT is set too, because a shell that starts this program in the background has it ignored.
    signal.signal(signal.SIGINT, stop_once)
    signal.signal(signal.SIGTERM, stop_once)
    sys.exit(main(sys.argv[1:]))
